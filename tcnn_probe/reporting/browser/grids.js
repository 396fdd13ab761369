// The grids of heads: their colours and the legend. After the grids of the runs comes that of the difference of two.

const SAME_OR_NOT = ["same type", "another type"]

const colouredVariable = () => variables.find(variable => variable.name === state.colour)

function colourScale(variable, isDifference) {
  if (variable.types) {
    return isDifference ? [palettes.same, -0.5, 1.5] : [palettes.types, -0.5, types.length - 0.5]
  }
  if (isDifference) {
    const bound = variable.widest || 1
    return [palettes.differences, -bound, bound]
  }
  const [low, high] = variable.limits
  return [palettes.numbers, low, high > low ? high : low + 1]
}

function updateGrids() {
  const variable = colouredVariable()
  const { mark } = state
  grids.forEach((cells, run) => {
    const isDifference = run === runs.length
    const { row: rows, column: columns } = cells.data
    const cellValues = new Float64Array(rows.length)
    const texts = []
    for (let i = 0; i < rows.length; i++) {
      const [row, column] = [rows[i], columns[i]]
      if (isDifference) {
        const difference = differenceOf(variable, mark, row, column)
        cellValues[i] = difference
        texts.push(variable.types ? (SAME_OR_NOT[difference] ?? "no value") : describeValue(variable, difference))
      } else {
        const value = valueOf(variable, run, mark, row, column)
        cellValues[i] = value
        texts.push(describeValue(variable, value))
      }
    }
    cells.data = { ...cells.data, value: cellValues, text: texts }
    const [palette, low, high] = colourScale(variable, isDifference)
    mappers[run].setv({ palette, low, high })
  })
}

function updateLegend() {
  const variable = colouredVariable()
  const entries = []

  const addEntry = (...nodes) => {
    const entry = element("span")
    entry.append(...nodes)
    entries.push(entry, " ")
  }
  const addSwatch = (colour, text) => {
    addEntry(element("span", "", { className: "swatch", style: `background:${colour}` }), text)
  }
  const addRamp = ([palette, low, high], title) => {
    const stops = palette.filter((_, i) => i % 15 === 0)
    const style = `background:linear-gradient(to right,${stops})`
    const ramp = element("span", "", { className: "ramp", style })
    addEntry(element("b", title), ` ${short(low)} `, ramp, short(high) + variable.unit)
  }

  if (variable.types) {
    types.forEach((type, i) => addSwatch(palettes.types[i], type))
    if (hasDifference) SAME_OR_NOT.forEach((text, i) => addSwatch(palettes.same[i], text))
  } else {
    addRamp(colourScale(variable, false), variable.label)
    if (hasDifference) addRamp(colourScale(variable, true), "difference")
  }
  addSwatch(palettes.missing, "no value")
  addSwatch("var(--absent)", "no such head")
  $("legend").replaceChildren(...entries)
  $("legend").title = variable.meaning
}

// Bokeh takes the colours of axes and labels from the page's styles, but not those of lines and cells.
function updateTheme() {
  if (isSnapshot) updateStrips()
  const styles = getComputedStyle(document.documentElement)
  const colour = name => ({ value: styles.getPropertyValue(name).trim() })
  for (const { renderers } of plots) {
    for (const { name, glyph } of renderers) {
      for (const property of ["line_color", "fill_color"]) {
        // The name of a renderer is that of its run, "run 0", and the style is --run-0.
        if (property in glyph.properties) glyph[property] = colour(`--${name.replace(" ", "-")}`)
      }
    }
  }
  const edges = { cells: "--page", halo: "--page", box: "--ink" }
  for (const frame of frames) {
    frame.background_fill_color = colour("--absent").value
    for (const { name, glyph } of frame.renderers) glyph.line_color = colour(edges[name])
  }
}
