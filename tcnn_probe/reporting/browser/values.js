// The numbers of the page. Bokeh calls the whole program once, when its document is ready, with `page` (JSON), `numbers`
// and `maps` (bytes), and with its own models: `grids`, `mappers`, `boxes`, `frames`, `sources` and `plots`.
const { along, marks, layers, heads, runs, variables, types, palettes, tiles, images, pictures, border, first, image_names } =
  JSON.parse(page)

const isSingle = runs.length === 1
const hasDifference = runs.length === 2
const isSnapshot = marks.length === 1 // no curves, and nothing to play

// The numbers are float32, shuffled for compression: the first byte of each comes first, then the second of each, ...
function unshuffled(buffer) {
  const shuffled = new Uint8Array(buffer)
  const bytes = new Uint8Array(shuffled.length)
  const count = shuffled.length / 4
  for (let byte = 0; byte < 4; byte++) {
    for (let i = 0; i < count; i++) bytes[4 * i + byte] = shuffled[byte * count + i]
  }
  return new Float32Array(bytes.buffer)
}
const values = unshuffled(numbers)

// The page opens at the last mark that all runs have.
const lastShared = marks.findLastIndex((_, mark) => runs.every(run => run.marked[mark]))

const state = {
  mark: lastShared < 0 ? marks.length - 1 : lastShared,
  row: first[0], // of the chosen head: its layer
  column: first[1],
  colour: variables[0].name,
  sortColumn: null,
  isDescending: false,
}

// A number of a variable; NaN if there is no such number.
function valueOf(variable, run, mark, row, column) {
  const start = variable.starts[run]
  if (start === null) return NaN
  if (variable.of === "model") return values[start + mark]
  if (variable.of === "layer") return values[start + mark * layers.length + row]
  return values[start + (mark * layers.length + row) * heads.length + column]
}

// The second run minus the first; for types of heads, 1 where they differ and 0 where they are the same.
function differenceOf(variable, mark, row, column) {
  const [first, second] = [0, 1].map(run => valueOf(variable, run, mark, row, column))
  if (!variable.types) return second - first
  return Number.isNaN(first + second) ? NaN : Number(first !== second)
}

const columnsOf = row => [...heads.keys()].filter(column => heads[column] < layers[row].heads)

// Words for numbers.

const isKnown = value => !Number.isNaN(value)
const short = value => String(Number(value.toPrecision(5)))

function describeValue(variable, value) {
  if (!isKnown(value)) return "no value"
  return variable.types ? types[value] : short(value) + variable.unit
}

// Elements of the page.

const $ = id => document.getElementById(id)

function element(tag, text = "", properties = {}) {
  return Object.assign(document.createElement(tag), { textContent: text }, properties)
}

// A dot in the colour of a run, where there are several.
function dotsOf(run) {
  return isSingle ? [] : [element("span", "", { className: "dot", style: `background:var(--run-${run})` })]
}
