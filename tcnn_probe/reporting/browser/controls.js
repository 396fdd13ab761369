// The slider, the choice of a head, and all that the page does at first.

const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }

let tableTimer = null
let playTimer = null

function showMark(mark) {
  state.mark = mark
  $("marks").value = mark
  updateGrids()
  updateNumbers()
  updateMaps()
  // The table is long, and waits until the slider rests.
  clearTimeout(tableTimer)
  tableTimer = setTimeout(updateTable, 200)
}

function chooseHead(row, column) {
  Object.assign(state, { row, column })
  updateNumbers()
  updateCurves()
  updateMaps()
}

function chooseByArrow(event) {
  if (!(event.key in ARROWS) || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return
  event.preventDefault() // the page would scroll
  const [down, right] = ARROWS[event.key]
  const clamp = (index, last) => Math.max(0, Math.min(index, last))
  const row = clamp(state.row + down, layers.length - 1)
  chooseHead(row, clamp(state.column + right, columnsOf(row).length - 1))
}

function chooseByClick(cells) {
  const [index] = cells.selected.indices
  if (index === undefined) return
  chooseHead(cells.data.row[index], cells.data.column[index])
  // Bokeh would fade the cells that are not selected, and their colours would no longer be those of the legend.
  cells.selected.indices = []
}

function goTo(id) {
  $(id).focus({ preventScroll: true })
  $(id).scrollIntoView({ block: "center" })
}

function showFinding(button) {
  const { mark, row, column } = button.dataset
  showMark(Number(mark))
  chooseHead(Number(row), Number(column))
  goTo("chosen")
}

function playOrPause() {
  if (playTimer === null) {
    // All marks in twelve seconds, but not slower than a step in 0.7 s nor faster than one in 0.1 s.
    const milliseconds = Math.min(700, Math.max(100, 12000 / marks.length))
    playTimer = setInterval(() => showMark((state.mark + 1) % marks.length), milliseconds)
  } else {
    clearInterval(playTimer)
    playTimer = null
  }
  $("play").textContent = playTimer === null ? "▶ play" : "⏸ pause"
}

// Controls.

for (const variable of variables.filter(variable => variable.of !== "model")) {
  $("colour").append(element("option", variable.label, { value: variable.name }))
}
$("colour").onchange = () => {
  state.colour = $("colour").value
  updateLegend()
  updateGrids()
}
$("image").append(...image_names.map(name => element("option", name)))
$("image").onchange = updateMaps
$("own").onchange = updateMaps
$("mapcontrols").hidden = !tiles.length
$("marks").max = marks.length - 1
$("marks").oninput = () => showMark(Number($("marks").value))
$("play").hidden = $("marks").parentElement.hidden = isSnapshot
$("play").onclick = playOrPause
$("copy").onclick = copyTable
$("tohealth").onclick = () => goTo("health")
for (const button of document.querySelectorAll("[data-row]")) button.onclick = () => showFinding(button)

$("grids").onkeydown = chooseByArrow
for (const cells of grids) {
  cells.selected.connect(cells.selected.properties.indices.change, () => chooseByClick(cells))
}
if (isSnapshot) window.addEventListener("resize", updateStrips)
for (const plot of plots) plot.properties.inner_width.change.connect(moveMarkers)
matchMedia("(prefers-color-scheme: dark)").onchange = updateTheme
// Bokeh makes each figure a stop of the tab key, without a name; the grids have stops of their own.
for (const view of Bokeh.index.roots) view.canvas_view?.events_el.setAttribute("tabindex", "-1")

// The first view.

addTitles()
updateTheme()
updateLegend()
updateCurves()
showMark(state.mark) // and then the table, which takes the longest
// Arrow keys work at once, but in the frame of a notebook the cell keeps the keyboard.
if (window.top === window) document.querySelector(".cells").focus({ preventScroll: true })
document.body.dataset.ready = "yes"
