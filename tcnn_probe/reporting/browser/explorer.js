"use strict"
// A page to explore attention maps: click a pixel to look from, choose a layer and a head.

const UNKNOWN = 255 // the byte of a cell without a value; 254 is the largest value of its map
const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }

const $ = id => document.getElementById(id)

function element(tag, text = "", properties = {}) {
  return Object.assign(document.createElement(tag), { textContent: text }, properties)
}

const { layers, pictures, size, palette, missing } = JSON.parse($("about").textContent)
const bytesOf = id => Uint8Array.from(atob($(id).textContent), letter => letter.charCodeAt(0))
const largestValues = new Float32Array(bytesOf("largest").buffer)
const cellBytes = bytesOf("cells")
const mapColours = palette.map(colour => [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16)))
const short = value => String(Number(value.toPrecision(3)))

// The choices of where to look from: a pixel, the class token, or a number among queries that lie on no grid.

const hasMaps = name => layers.some(layer => layer.maps[name])

function numberedSources(name, word) {
  const count = Math.max(0, ...layers.map(layer => layer.maps[name]?.queries[0] ?? 0))
  return Array.from({ length: count }, (_, number) => ({ name, number, label: `${word} ${number}` }))
}

const sources = [
  ...(hasMaps("attention") ? [{ name: "attention", label: "a pixel: click the image" }] : []),
  ...(hasMaps("class_attention") ? [{ name: "class_attention", label: "the class token" }] : []),
  ...numberedSources("attention_by_query", "query"),
  ...numberedSources("attention_by_class", "token of class"),
]

const firstPixel = layers.flatMap(layer => layer.maps.attention?.pixels ?? [])[0]
const state = {
  layer: layers.length - 1,
  head: 0,
  source: 0,
  image: 0,
  pixel: firstPixel ?? size.map(side => side >> 1),
}

// The index of the smallest distance; the first of two that are equal, as numpy's argmin.
function argmin(distances) {
  return distances.reduce((best, distance, i) => (distance < distances[best] ? i : best), 0)
}

function cellOf(layer, pixel) {
  return [0, 1].map(axis => {
    const centres = Array.from({ length: layer.shape[axis] }, (_, i) => layer.centre[axis] + i * layer.spacing[axis])
    return argmin(centres.map(centre => Math.abs(centre - pixel[axis])))
  })
}

// The query that is chosen: the maps that it is in, its index in these, and the pixel from which it looks, if it is one.
// Undefined if the layer has no map from there.
function chosenQuery(layer) {
  const { name, number } = sources[state.source]
  const entry = layer.maps[name]
  if (!entry || number >= entry.queries[0]) return undefined
  if (name !== "attention") return { entry, index: number ?? 0 }
  if (entry.pixels) {
    const distances = entry.pixels.map(([y, x]) => Math.hypot(y - state.pixel[0], x - state.pixel[1]))
    const index = argmin(distances)
    return { entry, index, pixel: entry.pixels[index] }
  }
  // Queries may lie on a coarser or finer grid than the keys.
  const [rows, columns] = entry.queries
  const cell = cellOf(layer, state.pixel)
  const [y, x] = cell.map((key, axis) => Math.floor((key * entry.queries[axis]) / layer.shape[axis]))
  return { entry, index: y * columns + x, pixel: state.pixel }
}

function indexOf(layer, query, head) {
  const queryCount = query.entry.queries.reduce((product, count) => product * count, 1)
  return (state.image * layer.heads.length + head) * queryCount + query.index
}

function largestOf(layer, query, head) {
  return largestValues[query.entry.first + indexOf(layer, query, head)]
}

function byteOf(layer, query, head, cell) {
  const [rows, columns] = layer.shape
  return cellBytes[query.entry.start + indexOf(layer, query, head) * rows * columns + cell]
}

// Draw a map over the picture; `brightest` is the value that has the brightest colour.
function drawMap(frame, layer, query, head, brightest) {
  const [height, width] = layer.shape
  const canvas = element("canvas", "", { width, height })
  const pixels = new ImageData(width, height)
  const share = largestOf(layer, query, head) / (brightest || 1)
  for (let i = 0; i < height * width; i++) {
    const byte = byteOf(layer, query, head, i)
    if (byte === UNKNOWN) continue
    const brightness = (byte / 254) * share
    pixels.data.set([...mapColours[Math.round(brightness * 255)], 255 * (0.35 + 0.6 * brightness)], 4 * i)
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0)

  const picture = element("div", "", { className: "picture" })
  picture.style.backgroundImage = `url(${pictures[state.image]})`
  const nodes = [picture, atCells(layer, canvas, [0, 0], layer.shape)]
  if (query.pixel) {
    const box = element("i", "", { className: "query" })
    nodes.push(atCells(layer, box, cellOf(layer, query.pixel), [1, 1]))
  }
  frame.replaceChildren(...nodes)
  frame.style.aspectRatio = `${size[1]} / ${size[0]}`
}

// Place a node over a rectangle of cells.
function atCells(layer, node, [y, x], [height, width]) {
  const { origin, spacing } = layer
  const percent = (length, side) => `${(100 * length) / side}%`
  Object.assign(node.style, {
    top: percent(origin[0] + y * spacing[0], size[0]),
    left: percent(origin[1] + x * spacing[1], size[1]),
    height: percent(height * spacing[0], size[0]),
    width: percent(width * spacing[1], size[1]),
  })
  return node
}

function update() {
  const layer = layers[state.layer]
  const query = chosenQuery(layer)
  state.head = Math.min(state.head, layer.heads.length - 1)
  updateControls(layer)
  $("chosen").textContent = describeChoice(layer, query)
  $("map").replaceChildren()
  $("heads").replaceChildren()
  if (!query) return

  const largest = layer.heads.map((_, head) => largestOf(layer, query, head))
  const largestOfLayer = Math.max(...largest)
  const brightest = head => ($("common").checked ? largestOfLayer : largest[head])
  drawMap($("map"), layer, query, state.head, brightest(state.head))
  layer.heads.forEach((name, head) => {
    const title = `largest value ${short(largest[head])}`
    const button = element("button", "", { ariaPressed: String(head === state.head), title })
    const frame = element("div", "", { className: "frame" })
    drawMap(frame, layer, query, head, brightest(head))
    button.append(frame, `head ${name}`)
    button.onclick = () => {
      state.head = head
      update()
      $("heads").children[head].focus()
    }
    $("heads").append(button)
  })
}

function updateControls(layer) {
  $("head").replaceChildren(...layer.heads.map((name, head) => element("option", name, { value: head })))
  for (const name of ["layer", "head", "image"]) $(name).value = state[name]
  $("from").value = state.source
}

function describeChoice(layer, query) {
  const place = query?.pixel ? `pixel (y, x) = (${query.pixel.join(", ")})` : sources[state.source].label
  const head = `${layer.name}, head ${layer.heads[state.head]}, from ${place}: `
  if (query) return `${head}largest value ${short(largestOf(layer, query, state.head))}`
  const reason = missing[layer.name] ? `, ${missing[layer.name]}` : " of this layer"
  return `${head}no map${reason}`
}

function lookFrom(pixel) {
  const source = sources.findIndex(source => source.name === "attention")
  if (source < 0) return
  state.source = source
  state.pixel = pixel.map((x, axis) => Math.max(0, Math.min(size[axis] - 1, x)))
  update()
}

function pixelUnder(event) {
  const { left, top, width, height } = $("map").getBoundingClientRect()
  const y = ((event.clientY - top) / height) * size[0]
  const x = ((event.clientX - left) / width) * size[1]
  return [Math.floor(y), Math.floor(x)]
}

function describePointer(event) {
  const layer = layers[state.layer]
  const query = chosenQuery(layer)
  if (!query) return
  const [y, x] = cellOf(layer, pixelUnder(event))
  const byte = byteOf(layer, query, state.head, y * layer.shape[1] + x)
  const value = (byte / 254) * largestOf(layer, query, state.head)
  const attention = byte === UNKNOWN ? "unknown" : short(value)
  $("under").textContent =
    `under the pointer: row ${y}, column ${x} of ${layer.shape.join(" x ")}, attention ${attention}`
}

function moveByArrow(event) {
  if (!(event.key in ARROWS) || event.ctrlKey || event.altKey || event.metaKey || event.shiftKey) return
  event.preventDefault() // the page would scroll
  const { spacing } = layers[state.layer]
  lookFrom(state.pixel.map((x, axis) => x + Math.round(ARROWS[event.key][axis] * spacing[axis])))
}

layers.forEach((layer, i) => $("layer").append(element("option", layer.name, { value: i })))
sources.forEach((source, i) => $("from").append(element("option", source.label, { value: i })))
pictures.forEach((_, i) => $("image").append(element("option", i, { value: i })))
$("image").parentElement.hidden = pictures.length < 2

const controls = { layer: "layer", head: "head", from: "source", image: "image" }
for (const [id, name] of Object.entries(controls)) {
  $(id).onchange = () => {
    state[name] = Number($(id).value)
    update()
  }
}
$("common").onchange = update
$("map").onclick = event => lookFrom(pixelUnder(event))
$("map").onmousemove = describePointer
$("map").onkeydown = moveByArrow
update()
document.body.dataset.ready = "yes"
