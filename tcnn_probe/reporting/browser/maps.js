// The maps of the chosen head and image. Each entry of `tiles` has the maps of a layer in a run, of shape
// (mark, image, head, height, width); of shape (mark, image, head) if there is only a number for each.

const FULL_WIDTH = { style: "width:100%" }
const UNKNOWN = 255 // the byte of a cell without a value; 254 is the largest value of its map

const mapColours = palettes.maps.map(colour => [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16)))

// Largest values come first, as float32, then a byte for each cell.
function withBytes(entry) {
  const [kept, imageCount, headCount] = entry.shape
  const count = kept * imageCount * headCount
  const buffer = maps[entry.place]
  return { ...entry, largest: new Float32Array(buffer, 0, count), cells: new Uint8Array(buffer, 4 * count) }
}

const imageOf = entry => runs[entry.run].images.indexOf(images[$("image").selectedIndex])

function indexOf(entry, mark, column) {
  const [, imageCount, headCount] = entry.shape
  return (mark * imageCount + imageOf(entry)) * headCount + column
}

function updateMaps() {
  const layer = layers[state.row].name
  const entries = tiles
    .filter(entry => entry.layer === layer && imageOf(entry) >= 0 && imageOf(entry) < entry.shape[1])
    .map(withBytes)
  const nodes = runs.flatMap((_, run) => mapsOfRun(run, entries))
  if (!nodes.length) nodes.push(element("span", `No maps of ${layer}.`))
  $("tiles").replaceChildren(...nodes)
}

function mapsOfRun(run, entries) {
  const { name, kept: keptMarks } = runs[run]
  // Maps of the last mark at or before the one shown that has any.
  const kept = Math.max(
    0,
    keptMarks.findLastIndex(mark => mark <= state.mark),
  )
  const shown = entries.filter(entry => entry.run === run && entry.shape[3])
  const nodes = []
  if (!shown.length) return nodes
  if (!isSingle) {
    const title = element("b", "", FULL_WIDTH)
    title.append(...dotsOf(run), name)
    nodes.push(title)
  }
  if (keptMarks[kept] !== state.mark) {
    const text = `Maps of ${along} ${marks[keptMarks[kept]]}: those of ${along} ${marks[state.mark]} are not on this page.`
    nodes.push(element("span", text, FULL_WIDTH))
  }
  for (const entry of shown) {
    const headCount = entry.shape[2]
    // A class query has a map for each class, whichever head is chosen.
    const columns = entry.by === "class" ? [...Array(headCount).keys()] : [state.column]
    for (const column of columns) {
      if (column < headCount) nodes.push(mapOf(entry, entries, kept, column))
    }
  }
  return nodes
}

function mapOf(entry, entries, kept, column) {
  const index = indexOf(entry, kept, column)
  const largest = entry.largest[index]
  const brightest = $("own").checked ? largest : largestOfAll(entries, entry.name, column)
  const comparison = brightest === largest ? "" : ` (brightest is ${short(brightest)})`
  const caption = [entry.label, `largest value ${short(largest)}${comparison}`]
  for (const number of entries) {
    const isBeside = number.run === entry.run && number.beside === entry.name && !number.shape[3]
    if (isBeside) caption.push(`${number.label} ${short(number.largest[indexOf(number, kept, column)])}`)
  }
  if (entry.query) caption.push("box: the middle")
  const picture = entry.windows ? null : pictures[$("image").selectedIndex]
  return drawMap(entry, index, largest / (brightest || 1), caption, picture)
}

// The largest value of all marks and runs, so that colours mean the same everywhere.
function largestOfAll(entries, name, column) {
  let largest = 0
  for (const entry of entries.filter(entry => entry.name === name)) {
    for (let mark = 0; mark < entry.shape[0]; mark++) {
      largest = Math.max(largest, entry.largest[indexOf(entry, mark, column)] ?? 0)
    }
  }
  return largest
}

// Draw a map over its picture; `share` is the brightness of its largest value.
function drawMap(entry, index, share, caption, picture) {
  const [, , , height, width] = entry.shape
  const canvas = element("canvas", "", { width, height, role: "img", ariaLabel: caption.join(", ") })
  const pixels = new ImageData(width, height)
  for (let i = 0; i < height * width; i++) {
    const byte = entry.cells[index * height * width + i]
    if (byte === UNKNOWN) continue
    const brightness = (byte / 254) * share
    const colour = mapColours[Math.min(255, Math.round(brightness * 255))]
    // Over a picture dark cells let more of it through.
    const opacity = picture ? 0.35 + 0.6 * brightness : 1
    pixels.data.set([...colour, 255 * opacity], 4 * i)
  }
  canvas.getContext("2d").putImageData(pixels, 0, 0)

  const frame = element("div", "", { className: "frame" })
  if (picture) frame.style.backgroundImage = `url(${picture})`
  frame.append(canvas)
  if (entry.query) {
    const [y, x] = entry.query
    const style =
      `top:${(100 * y) / height}%;left:${(100 * x) / width}%;` + `height:${100 / height}%;width:${100 / width}%`
    frame.append(element("div", "", { className: "query", style }))
  }
  const figure = element("figure", "", { className: "tile" })
  figure.append(frame, element("figcaption", caption.join("\n")))
  return figure
}
