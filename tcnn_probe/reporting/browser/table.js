// The table of all heads at the mark shown.

const tableVariables = variables.filter(variable => variable.of === "head")
const tableTitles = [...(isSingle ? [] : ["run"]), "layer", "head", ...tableVariables.map(variable => variable.name)]

function tableRows() {
  const rows = []
  runs.forEach((run, index) => {
    if (!run.marked[state.mark]) return
    layers.forEach((layer, row) => {
      const headCount = run.heads[layer.name] ?? 0
      for (const column of columnsOf(row).filter(column => heads[column] < headCount)) {
        const cells = tableVariables.map(variable => {
          const value = valueOf(variable, index, state.mark, row, column)
          return variable.types ? (types[value] ?? "") : value
        })
        const line = [...(isSingle ? [] : [run.name]), layer.name, heads[column], ...cells]
        rows.push(Object.assign(line, { row, column }))
      }
    })
  })
  if (state.sortColumn !== null) rows.sort(compareRows)
  return rows
}

function compareRows(first, second) {
  const [x, y] = [first[state.sortColumn], second[state.sortColumn]]
  // What has no value is last in either order.
  if (Number.isNaN(x)) return 1
  if (Number.isNaN(y)) return -1
  const ascending = x < y ? -1 : x > y ? 1 : 0
  return state.isDescending ? -ascending : ascending
}

function updateTable() {
  const body = document.createElement("tbody")
  for (const cells of tableRows()) {
    const line = body.insertRow()
    const links = isSingle ? 2 : 3 // the cells before the numbers name the head
    cells.forEach((cell, place) => {
      const text = typeof cell === "number" ? shownNumber(cell) : cell
      if (place !== links - 1) line.insertCell().textContent = text
      else line.insertCell().append(linkTo(cells.row, cells.column, text))
    })
  }
  $("heads").tBodies[0].replaceWith(body)
}

function linkTo(row, column, text) {
  const link = element("button", text, { className: "link" })
  link.onclick = () => {
    chooseHead(row, column)
    goTo("chosen")
  }
  return link
}

const shownNumber = value => (isKnown(value) ? short(value) : "")

function sortBy(column, title) {
  state.isDescending = state.sortColumn === column && !state.isDescending
  state.sortColumn = column
  for (const other of $("heads").tHead.rows[0].cells) other.ariaSort = null
  title.ariaSort = state.isDescending ? "descending" : "ascending"
  updateTable()
}

function addTitles() {
  const line = element("tr")
  tableTitles.forEach((text, column) => {
    const title = element("th", "", { scope: "col" })
    title.append(element("button", text))
    title.onclick = () => sortBy(column, title)
    line.append(title)
  })
  $("heads").tHead.append(line)
}

// A spreadsheet takes text that begins with one of these characters for a formula. A float32 has seven digits.
function asPlainText(cell) {
  if (typeof cell !== "string") return Number(cell.toPrecision(7))
  return cell.replace(/[\t\r\n]/g, " ").replace(/^(?=[=+@-])/, "'")
}

function copyTable() {
  const lines = [tableTitles, ...tableRows()].map(cells => cells.map(asPlainText).join("\t"))
  const area = element("textarea", lines.join("\n"))
  document.body.append(area)
  area.select()
  document.execCommand("copy") // navigator.clipboard is forbidden in the frames of notebooks
  area.remove()
}
