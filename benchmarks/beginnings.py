"""(p) What a user waits for first: imports, commands, and the first forward of a recorder.

    python benchmarks/beginnings.py      about two minutes on one core

Each line is measured in processes of its own, as processor time, and is the least of several.
"""

import argparse
import os
import subprocess
import sys
import tempfile

STARTS = {
    "import torch, timm": "import torch, timm",
    "import tcnn_probe": "import tcnn_probe",
    "tcnn-probe --help": "import tcnn_probe.command_line as c; c.main(['--help'])",
    "tcnn-probe show": "import tcnn_probe.command_line as c; c.main(['show', STORE])",
    "import of all that record needs": "import timm, tcnn_probe; tcnn_probe.record",
}
MODELS = {
    "vit_tiny_patch16_224": (96, 8),
    "deit_small_patch16_224": (224, 8),
    "vit_base_patch16_224": (224, 2),
}
"""Image size and batch size."""

RECORDING = """
import sys, timm, torch, tcnn_probe
model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2).eval()
with tcnn_probe.record(model, sys.argv[1]) as recorder, torch.no_grad():
    model(torch.randn(2, 3, 32, 32))
    recorder.mark(epoch=0)
"""
FORWARDS = """
import sys, time, timm, torch, tcnn_probe
name, size, batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
model = timm.create_model(name, img_size=size).eval()
images = torch.randn(batch, 3, size, size)

def seconds(step):
    start = time.process_time()
    step()
    return time.process_time() - start

with torch.inference_mode():
    for _ in range(3):  # warms up
        model(images)
    plain = min(seconds(lambda: model(images)) for _ in range(4))
    recorders = []
    print(seconds(lambda: recorders.append(tcnn_probe.record(model))) / plain)
    print(seconds(lambda: model(images)) / plain)
    print(min(seconds(lambda: model(images)) for _ in range(4)) / plain)
    recorders[0].mark(epoch=0)
    recorders[0].remove()
    recorders.append(tcnn_probe.record(model))
    print(seconds(lambda: model(images)) / plain)
"""


def processor_time(code: str) -> float:
    """Return the processor time in seconds of a Python process that runs the code."""
    before = os.times()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    after = os.times()
    return sum(after[2:4]) - sum(before[2:4])


def imports_torch(code: str) -> bool:
    """Return whether the code imports torch, also where it ends by exiting."""
    program = f"import atexit, sys\natexit.register(lambda: print('torch' in sys.modules))\n{code}"
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    return run.stdout.split()[-1] == "True"


def starts(rounds: int) -> None:
    """Print the processor time of imports and commands, relative to importing torch and timm."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/run.zarr"
        subprocess.run([sys.executable, "-c", RECORDING, store], check=True)
        codes = {name: code.replace("STORE", repr(store)) for name, code in STARTS.items()}
        times = {
            name: min(processor_time(code) for _ in range(rounds)) for name, code in codes.items()
        }
        print("| | times `import torch, timm` | imports torch |\n|---|---|---|")
        for name, code in codes.items():
            ratio = times[name] / times["import torch, timm"]
            print(f"| {name} | {ratio:.2f} | {'yes' if imports_torch(code) else 'no'} |")


def forwards(rounds: int) -> None:
    """Print the processor time of the first forwards of a recorder, relative to a plain forward."""
    print("\n| | `record()` | first forward | later ones | first of another recorder |")
    print("|---|---|---|---|---|")
    for model, (size, batch) in MODELS.items():
        command = [sys.executable, "-c", FORWARDS, model, str(size), str(batch)]
        runs = [
            subprocess.run(command, check=True, capture_output=True, text=True)
            for _ in range(rounds)
        ]
        columns = zip(*(map(float, run.stdout.split()) for run in runs), strict=True)
        cells = " | ".join(f"{min(column):.2f}" for column in columns)
        print(f"| {model}, {size} pixels, batch {batch} | {cells} |")


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="processes a line")
    rounds = parser.parse_args(arguments).rounds
    starts(rounds)
    forwards(rounds)


if __name__ == "__main__":
    main()
