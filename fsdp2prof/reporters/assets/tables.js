"use strict";
// A click on a header sorts its table: numbers by value, names as people count (layers.9 before layers.10).
const names = new Intl.Collator("en", { numeric: true });

function key(row, column) {
  const cell = row.cells[column];
  return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  if (typeof a === typeof b) return names.compare(a, b);
  return typeof a === "number" ? 1 : -1;  // what is unknown is least
}

for (const header of document.querySelectorAll("th[data-sortable]")) {
  const sort = () => {
    const body = header.closest("table").tBodies[0];
    const numeric = header.classList.contains("number") || header.classList.contains("bar");
    const before = header.getAttribute("aria-sort");
    const descending = before ? before === "ascending" : numeric;
    for (const other of header.parentNode.cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const rows = [...body.rows].map(row => [key(row, header.cellIndex), row]);
    rows.sort(([a], [b]) => (descending ? compare(b, a) : compare(a, b)));
    body.append(...rows.map(([, row]) => row));
  };
  header.querySelector("button").addEventListener("click", sort);
}
