// The numbers of the chosen head at the mark shown, and the curves over all marks.

const curveVariables = variables.filter(variable => variable.curve)

function updateNumbers() {
  const { mark, row, column } = state
  for (const variable of variables) {
    const place = $(`value ${variable.name}`)
    if (!place) continue
    const nodes = runs.flatMap((_, run) => {
      const value = valueOf(variable, run, mark, row, column)
      const number = element("span", "", { className: "number" })
      const data = element("data", describeValue(variable, value), { value: String(value) })
      number.append(...dotsOf(run), data)
      return [number, " "]
    })
    place.replaceChildren(...nodes)
  }
  $("facts").replaceChildren(...runs.map(describeFacts))
  $("chosen").textContent = `${layers[row].name}, head ${heads[column]}`
  $("now").textContent = `${along} ${marks[mark]} (${mark + 1} of ${marks.length})`
  moveMarkers()
}

// A line of what has no curve: the type of the head, and the numbers of its layer.
function describeFacts(run, index) {
  const facts = variables
    .filter(variable => variable.types || variable.of === "layer")
    .map(variable => [variable, valueOf(variable, index, state.mark, state.row, state.column)])
    .filter(([, value]) => isKnown(value))
    .map(([variable, value]) => `${variable.label} ${describeValue(variable, value)}`)
  const line = element("p")
  const name = isSingle ? "" : `${run.name}: `
  line.append(...dotsOf(index), name + (facts.join(" · ") || "no value"))
  return line
}

// Place the line that shows the mark over each curve. As a part of Bokeh's figures it would have them drawn again at each
// step.
function moveMarkers() {
  for (const plot of plots) {
    const { start, end } = plot.x_range
    const left = plot.outer_width - plot.inner_width - border
    const share = (marks[state.mark] - start) / (end - start)
    $(plot.name).style.left = `${left + plot.inner_width * share}px`
  }
}

function updateCurves() {
  for (const variable of curveVariables) describeCurve(variable)
  sources.forEach((source, run) => {
    source.data = curveColumns(run)
  })
  if (isSnapshot) updateStrips()
  for (const box of boxes) box.data = { row: [state.row], column: [state.column] }
}

// Describe a curve for screen readers, by its first and last value; hide curves of heads that no run has.
function describeCurve(variable) {
  const { row, column } = state
  const descriptions = []
  runs.forEach((run, index) => {
    const known = [...marks.keys()].filter(mark => isKnown(valueOf(variable, index, mark, row, column)))
    if (!known.length) return
    const ends = known.length > 1 ? [known[0], known.at(-1)] : known
    const texts = ends.map(mark => {
      const value = valueOf(variable, index, mark, row, column)
      if (isSnapshot) return describeValue(variable, value)
      return `${describeValue(variable, value)} at ${along} ${marks[mark]}`
    })
    descriptions.push((isSingle ? "" : `${run.name}: `) + texts.join(" to "))
  })
  const isOfHead = variable.of === "head"
  const head = isOfHead ? `, ${layers[row].name}, head ${heads[column]}` : ""
  const description = descriptions.join("; ") || "no value"
  const name = isSnapshot ? variable.label : `${variable.label} by ${along}`
  $(`plot ${variable.name}`).ariaLabel = `${name}${head}; ${description}`
  $(`value ${variable.name}`).closest("figure").hidden = isOfHead && !descriptions.length
}

// The columns of a run's data source, one value for each of its marks.
function curveColumns(run) {
  const { row, column } = state
  const ownMarks = [...marks.keys()].filter(mark => runs[run].marked[mark])
  const columns = { [along]: ownMarks.map(mark => marks[mark]) }
  for (const variable of curveVariables) {
    const { name } = variable
    columns[name] = ownMarks.map(mark => valueOf(variable, run, mark, row, column))
    if (variable.of === "head") {
      columns[`${name} mean`] = ownMarks.map(mark => meanOverHeads(variable, run, mark, row))
    }
  }
  return columns
}

function meanOverHeads(variable, run, mark, row) {
  const known = columnsOf(row)
    .map(column => valueOf(variable, run, mark, row, column))
    .filter(isKnown)
  return known.reduce((sum, value) => sum + value, 0) / known.length
}
