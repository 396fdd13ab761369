// Of a single mark, where the number of the chosen head lies among those of all heads: a line for each of them.

const STRIP = { height: 26, all: 0.22, layer: 0.75 }

function updateStrips() {
  const styles = getComputedStyle(document.documentElement)
  const colour = name => styles.getPropertyValue(name).trim()
  for (const variable of curveVariables) {
    const canvas = $(`plot ${variable.name}`)
    if (canvas?.tagName !== "CANVAS" || canvas.closest("figure").hidden) continue
    const scale = window.devicePixelRatio || 1
    const width = canvas.clientWidth || 250
    canvas.width = width * scale
    canvas.height = STRIP.height * runs.length * scale
    const pen = canvas.getContext("2d")
    pen.scale(scale, scale)
    runs.forEach((_, run) => drawStrip(pen, variable, run, width, [colour("--ink"), colour(`--run-${run}`)]))
  }
}

function drawStrip(pen, variable, run, width, [ink, own]) {
  const [low, high] = variable.limits
  const top = STRIP.height * run
  const drawLine = (value, opacity, thickness, from, to, colour) => {
    if (!isKnown(value)) return
    const x = 3 + (width - 6) * (high > low ? (value - low) / (high - low) : 0.5)
    pen.globalAlpha = opacity
    pen.fillStyle = colour
    pen.fillRect(x - thickness / 2, top + from, thickness, to - from)
  }
  layers.forEach((_, row) => {
    const isOwn = row === state.row
    for (const column of columnsOf(row)) {
      const value = valueOf(variable, run, state.mark, row, column)
      drawLine(value, isOwn ? STRIP.layer : STRIP.all, isOwn ? 1.5 : 1, isOwn ? 6 : 9, 22, ink)
    }
  })
  const chosen = valueOf(variable, run, state.mark, state.row, state.column)
  drawLine(chosen, 1, 4, 1, 25, isSingle ? "#d55e00" : own)
}
