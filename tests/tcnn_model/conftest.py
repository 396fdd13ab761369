import torch

# Small tensors: several threads cost more than they bring, tenfold on a busy machine, and change the order of sums.
torch.set_num_threads(1)
