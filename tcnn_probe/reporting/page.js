// Runs once, when Bokeh's document is ready. `page` is JSON; `numbers` and `maps` are bytes; the rest are Bokeh's.
const $ = id => document.getElementById(id)
const {along, marks, layers, heads, runs, variables, types, palettes, tiles, images, pictures, border} = JSON.parse(page)
const element = (tag, text = "", properties = {}) =>
  Object.assign(document.createElement(tag), {textContent: text}, properties)

// All first bytes of the float64 numbers, then all second ones, ...
const shuffled = new Uint8Array(numbers), count = shuffled.length / 8
const bytes = new Uint8Array(shuffled.length)
for (let k = 0; k < 8; k++) for (let i = 0; i < count; i++) bytes[8 * i + k] = shuffled[k * count + i]
const all = new Float64Array(bytes.buffer)

const shared = marks.findLastIndex((_, i) => runs.every(run => run.marked[i]))  // where all runs have something to show
const state = {mark: shared < 0 ? marks.length - 1 : shared, row: 0, column: 0, colour: variables[0].name, sort: null, down: false}
const two = runs.length === 2, several = runs.length > 1
const value = (variable, run, mark, row, column, kind = "starts") => {  // NaN where there is none
  const start = variable[kind][run]
  if (start === null) return NaN
  if (variable.of === "model") return all[start + mark]
  if (variable.of === "layer") return all[start + mark * layers.length + row]
  return all[start + (mark * layers.length + row) * heads.length + column]
}
const short = x => String(Number(x.toPrecision(5)))
const text = (variable, x) =>
  Number.isNaN(x) ? "no value" : variable.types ? types[x] : short(x) + variable.unit
const range = (variable, run, mark, row, column) => {  // of the seeds, in words
  const [low, high] = ["lows", "highs"].map(kind => value(variable, run, mark, row, column, kind))
  return Number.isNaN(low) ? "" : ` (${short(low)} to ${short(high)})`
}
const difference = (variable, mark, row, column) => {
  const [a, b] = [0, 1].map(run => value(variable, run, mark, row, column))
  return variable.types ? (Number.isNaN(a + b) ? NaN : Number(a !== b)) : b - a
}
const same = ["same type", "another type"]
const columnsOf = row => heads.flatMap((head, column) => head < layers[row].heads ? [column] : [])

function recolour() {
  const variable = variables.find(one => one.name === state.colour)
  grids.forEach((cells, which) => {
    const differing = which === runs.length, mapper = mappers[which]
    const {row, column} = cells.data, values = new Float64Array(row.length)
    for (let i = 0; i < values.length; i++)
      values[i] = differing ? difference(variable, state.mark, row[i], column[i]) : value(variable, which, state.mark, row[i], column[i])
    const said = Array.from(values, (x, i) => differing && variable.types ? same[x] ?? "no value" :
      text(variable, x) + (differing ? "" : range(variable, which, state.mark, row[i], column[i])))
    cells.data = {...cells.data, value: values, text: said}
    const [palette, low, high] = scale(variable, differing)
    mapper.setv({palette, low, high})
  })
}
function scale(variable, differing) {
  if (variable.types)
    return differing ? [palettes.same, -0.5, 1.5] : [palettes.types, -0.5, types.length - 0.5]
  const bound = variable.widest || 1
  if (differing) return [palettes.differences, -bound, bound]
  const [low, high] = variable.limits
  return [palettes.numbers, low, high > low ? high : low + 1]
}
function legend() {
  const variable = variables.find(one => one.name === state.colour), parts = []
  const part = (...nodes) => { const span = element("span"); span.append(...nodes); parts.push(span, " ") }
  const colours = (kind, style) => element("span", "", {className: kind, style: `background:${style}`})
  const swatch = (color, words) => part(colours("swatch", color), words)
  const ramp = ([palette, low, high], words) => part(element("b", words), ` ${short(low)} `,
    colours("ramp", `linear-gradient(to right,${palette.filter((_, i) => i % 15 === 0)})`), short(high) + variable.unit)
  if (variable.types) types.forEach((name, i) => swatch(palettes.types[i], name))
  else ramp(scale(variable, false), variable.label)
  if (two && variable.types) same.forEach((words, i) => swatch(palettes.same[i], words))
  else if (two) ramp(scale(variable, true), "difference")
  swatch(palettes.missing, "no value"), swatch("var(--absent)", "no such head")
  $("legend").replaceChildren(...parts)
  $("legend").title = variable.meaning
}

const ofRun = which => several ? [element("span", "", {className: "dot", style: `background:var(--run-${which})`})] : []
function captions() {
  for (const variable of variables) {
    const place = $(`value ${variable.name}`)
    if (!place) continue
    place.replaceChildren(...runs.flatMap((run, which) => {
      const x = value(variable, which, state.mark, state.row, state.column)
      const number = element("span", "", {className: "number"}), data = element("data", text(variable, x), {value: String(x)})
      number.append(...ofRun(which), data, element("small", range(variable, which, state.mark, state.row, state.column)))
      return [number, " "]
    }))
  }
  $("facts").replaceChildren(...runs.map((run, which) => {
    const known = variables.filter(one => one.types || one.of === "layer")
      .map(one => [one, value(one, which, state.mark, state.row, state.column)])
    const facts = known.filter(([, x]) => !Number.isNaN(x)).map(([one, x]) => `${one.label} ${text(one, x)}`)
    const line = element("p")
    line.append(...ofRun(which), (several ? `${run.name}: ` : "") + (facts.join(" · ") || "no value"))
    return line
  }))
  $("chosen").textContent = `${layers[state.row].name}, head ${heads[state.column]}`
  $("now").textContent = `${along} ${marks[state.mark]} (${state.mark + 1} of ${marks.length})`
  move()
}
function move() {  // the marks over the curves; as a part of Bokeh's figures each step would draw all of these again
  for (const plot of plots) {
    const {start, end} = plot.x_range, left = plot.outer_width - plot.inner_width - border
    $(plot.name).style.left = `${left + plot.inner_width * (marks[state.mark] - start) / (end - start)}px`
  }
}
function curves() {
  const range = marks.map((_, i) => i)
  const known = (variable, run) => range.filter(i => !Number.isNaN(value(variable, run, i, state.row, state.column)))
  for (const variable of variables.filter(variable => variable.curve)) {
    const described = runs.flatMap((run, which) => {
      const ends = known(variable, which).filter((_, i, all) => i === 0 || i === all.length - 1)
      const words = ends.map(i => `${text(variable, value(variable, which, i, state.row, state.column))} at ${along} ${marks[i]}`)
      return words.length ? [(several ? `${run.name}: ` : "") + words.join(" to ")] : []
    })
    const where = variable.of === "head" ? `, ${layers[state.row].name}, head ${heads[state.column]}` : ""
    $(`plot ${variable.name}`).ariaLabel = `${variable.label} by ${along}${where}; ${described.join("; ") || "no value"}`
    $(`value ${variable.name}`).closest("figure").hidden = variable.of === "head" && !described.length
  }
  sources.forEach((source, run) => {
    const there = range.filter(i => runs[run].marked[i])
    const columns = {[along]: there.map(i => marks[i])}
    for (const variable of variables.filter(one => one.curve)) {
      columns[variable.name] = there.map(i => value(variable, run, i, state.row, state.column))
      if (variable.lows[run] !== null) for (const [kind, end] of [["lows", "low"], ["highs", "high"]])
        columns[`${variable.name} ${end}`] = there.map(i => value(variable, run, i, state.row, state.column, kind))
      if (variable.of === "head") columns[`${variable.name} mean`] = there.map(i => {
        const known = columnsOf(state.row).map(column => value(variable, run, i, state.row, column)).filter(x => !Number.isNaN(x))
        return known.reduce((sum, x) => sum + x, 0) / known.length
      })
    }
    source.data = columns
  })
  boxes.forEach(box => { box.data = {row: [state.row], column: [state.column]} })
}

function open(entry) {
  const [kept, images, width] = entry.shape, many = kept * images * width
  return {...entry, largest: new Float32Array(maps[entry.place], 0, many), cells: new Uint8Array(maps[entry.place], 4 * many)}
}
const rgb = palettes.maps.map(color => [1, 3, 5].map(i => parseInt(color.slice(i, i + 2), 16)))
function tile(entry, at, share, caption, picture) {
  const [, , , height, width] = entry.shape, canvas = element("canvas", "", {width, height, role: "img"})
  const pixels = new ImageData(width, height), start = at * height * width
  for (let i = 0; i < height * width; i++) {
    const byte = entry.cells[start + i], part = byte / 254 * share
    if (byte === 255) continue
    pixels.data.set([...rgb[Math.min(255, Math.round(part * 255))], picture ? 255 * (0.35 + 0.6 * part) : 255], 4 * i)
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0)
  const frame = element("div", "", {className: "frame"}), figure = element("figure", "", {className: "tile"})
  if (picture) frame.style.backgroundImage = `url(${picture})`
  frame.append(canvas)
  if (entry.query) frame.append(element("div", "", {className: "query", style:
    `top:${100 * entry.query[0] / height}%;left:${100 * entry.query[1] / width}%;height:${100 / height}%;width:${100 / width}%`}))
  canvas.ariaLabel = caption.join(", ")
  figure.append(frame, element("figcaption", caption.join("\n")))
  return figure
}
function show() {
  const chosen = $("image").selectedIndex, layer = layers[state.row].name, found = []
  const image = entry => runs[entry.run].images.indexOf(images[chosen])
  const ofLayer = tiles.filter(one => one.layer === layer && 0 <= image(one) && image(one) < one.shape[1]).map(open)
  const place = (entry, when, column) => (when * entry.shape[1] + image(entry)) * entry.shape[2] + column
  const brightest = (name, column) => Math.max(...ofLayer.filter(one => one.name === name)  // of all epochs and runs
    .flatMap(one => Array.from({length: one.shape[0]}, (_, when) => one.largest[place(one, when, column)] ?? 0)))
  for (const [run, about] of runs.entries()) {
    const entries = ofLayer.filter(one => one.run === run)
    let kept = about.kept.findLastIndex(i => i <= state.mark)
    if (kept < 0) kept = 0
    const beside = entries.filter(entry => !entry.shape[3]), shown = entries.filter(entry => entry.shape[3])
    if (several && shown.length) {
      const title = element("b", "", {style: "width:100%"})
      title.append(...ofRun(run), about.name + (about.mapped ? ` (maps of ${about.mapped})` : ""))
      found.push(title)
    }
    if (shown.length && about.kept[kept] !== state.mark)
      found.push(element("span", `Maps of ${along} ${marks[about.kept[kept]]}: those of ${along} ${marks[state.mark]} are not on this page.`, {style: "width:100%"}))
    for (const entry of shown) {
      const ofClass = entry.by === "class", columns = ofClass ? [...Array(entry.shape[2]).keys()] : [state.column]
      for (const column of columns.filter(c => c < entry.shape[2])) {
        const at = place(entry, kept, column), top = $("own").checked ? entry.largest[at] : brightest(entry.name, column)
        const facts = beside.filter(one => one.beside === entry.name)
          .map(one => `${one.label} ${short(one.largest[place(one, kept, column)])}`)
        const bright = top === entry.largest[at] ? "" : ` (brightest is ${short(top)})`
        const caption = [entry.label, `largest value ${short(entry.largest[at])}${bright}`, ...facts]
        if (entry.query) caption.push("box: the middle")
        found.push(tile(entry, at, entry.largest[at] / (top || 1), caption, entry.windows ? null : pictures[chosen]))
      }
    }
  }
  if (!found.length) found.push(element("span", `No maps of ${layer}.`))
  $("tiles").replaceChildren(...found)
}

const shownColumns = variables.filter(one => one.of === "head")
function rows() {
  const found = []
  runs.forEach((run, which) => layers.forEach((layer, row) => {
    for (const column of run.marked[state.mark] ? columnsOf(row).filter(column => heads[column] < (run.heads[layer.name] ?? 0)) : [])
      found.push([...(several ? [run.name] : []), layer.name, heads[column],
        ...shownColumns.map(one => { const x = value(one, which, state.mark, row, column); return one.types ? types[x] ?? "" : x })])
  }))
  const {sort, down} = state
  if (sort !== null) found.sort((a, b) => {
    const [x, y] = [a[sort], b[sort]]
    return Number.isNaN(x) ? 1 : Number.isNaN(y) ? -1 : (x < y ? -1 : x > y ? 1 : 0) * (down ? -1 : 1)
  })
  return found
}
const titles = [...(several ? ["run"] : []), "layer", "head", ...shownColumns.map(one => one.name)]
function table() {
  const body = document.createElement("tbody")
  for (const row of rows()) {
    const line = body.insertRow()
    for (const cell of row) line.insertCell().textContent = typeof cell === "number" ? (Number.isNaN(cell) ? "" : Number(cell.toPrecision(5))) : cell
  }
  $("heads").tBodies[0].replaceWith(body)
}
$("heads").tHead.append(element("tr"))
titles.forEach((title, i) => {
  const cell = element("th", "", {scope: "col"})
  cell.append(element("button", title))
  cell.onclick = () => {
    state.down = state.sort === i && !state.down
    state.sort = i
    for (const other of $("heads").tHead.rows[0].cells) other.ariaSort = null
    cell.ariaSort = state.down ? "descending" : "ascending"
    table()
  }
  $("heads").tHead.rows[0].append(cell)
})
// A spreadsheet takes text that begins with these for a formula.
const plain = cell => typeof cell === "string" ? cell.replace(/[\t\r\n]/g, " ").replace(/^(?=[=+@-])/, "'") : cell
$("copy").onclick = () => {
  const area = element("textarea", [titles, ...rows()].map(row => row.map(plain).join("\t")).join("\n"))
  document.body.append(area)
  area.select()
  document.execCommand("copy")  // the newer way is forbidden in the frames of notebooks
  area.remove()
}

let later = null
function step(to) {
  state.mark = to
  $("marks").value = to
  recolour(), captions(), show()
  clearTimeout(later)
  later = setTimeout(table, 200)  // when the slider rests
}
function choose(row, column) {
  Object.assign(state, {row, column})
  captions(), curves(), show()
}
const arrows = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}
$("grids").onkeydown = event => {
  if (!(event.key in arrows) || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return
  event.preventDefault()  // the page would scroll
  const [down, right] = arrows[event.key], between = (x, last) => Math.max(0, Math.min(x, last))
  const row = between(state.row + down, layers.length - 1)
  choose(row, between(state.column + right, columnsOf(row).length - 1))
}
for (const button of document.querySelectorAll("[data-row]")) button.onclick = () => {
  const {mark, row, column} = button.dataset
  step(Number(mark))
  choose(Number(row), Number(column))
  arrive("chosen")
}
$("tohealth").onclick = () => arrive("health")
function arrive(id) {
  $(id).focus({preventScroll: true})
  $(id).scrollIntoView({block: "center"})
}
for (const cells of grids) cells.selected.connect(cells.selected.properties.indices.change, () => {
  const [i] = cells.selected.indices
  if (i === undefined) return
  choose(cells.data.row[i], cells.data.column[i])
  cells.selected.indices = []  // or Bokeh would fade the other cells, and their colours would lie
})
for (const one of variables.filter(one => one.of !== "model")) $("colour").append(element("option", one.label, {value: one.name}))
$("colour").onchange = () => { state.colour = $("colour").value; legend(), recolour() }
$("image").append(...images.map(name => element("option", name)))
$("image").onchange = $("own").onchange = show
$("mapcontrols").hidden = !tiles.length
$("marks").max = marks.length - 1
$("play").disabled = marks.length < 2
$("marks").oninput = () => step(Number($("marks").value))
let timer = null
$("play").onclick = () => {
  if (timer !== null) clearInterval(timer), timer = null
  else timer = setInterval(() => step((state.mark + 1) % marks.length), Math.min(700, Math.max(100, 12000 / marks.length)))
  $("play").textContent = timer === null ? "▶ play" : "⏸ pause"
}
for (const plot of plots) plot.properties.inner_width.change.connect(move)
// Bokeh takes colours of what it draws itself from the page's styles, but not those of lines and cells.
function paint() {
  const styles = getComputedStyle(document.documentElement), color = name => ({value: styles.getPropertyValue(name).trim()})
  for (const {renderers} of plots) for (const {name, glyph} of renderers)
    for (const property of ["line_color", "fill_color"])
      if (property in glyph.properties) glyph[property] = color(`--${name.replace(" ", "-")}`)  // "run 0"
  const edges = {cells: "--page", halo: "--page", box: "--ink"}
  for (const frame of frames) {
    frame.background_fill_color = color("--absent").value
    for (const {name, glyph} of frame.renderers) glyph.line_color = color(edges[name])
  }
}
matchMedia("(prefers-color-scheme: dark)").onchange = paint
// Bokeh puts a stop without a name into each figure; the grids have one of their own.
for (const view of Bokeh.index.roots) view.canvas_view?.events_el.setAttribute("tabindex", "-1")
paint(), legend(), curves(), step(state.mark), table()
// So that arrow keys work at once; in a notebook the cell keeps the keyboard.
if (window.top === window) document.querySelector(".cells").focus({preventScroll: true})
document.body.dataset.ready = "yes"
