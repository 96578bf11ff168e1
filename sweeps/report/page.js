"use strict";
// What the report's page does in a browser: draw the figures, sort and filter the table of trials,
// copy commands, and, while `sweep ui` serves the page, fetch it again and replace what changed.

const EVERY_MS = 2000;
const sorted = {column: null, falling: false};

function draw(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const plot = figure.querySelector(".plot");
  Plotly.react(plot, data.data, data.layout, {responsive: true, displaylogo: false});
}

function heads(table) {
  return [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
}

function value(row, column) {
  const cell = row.cells[column];
  return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b));
}

// Numbers come first, and cells without a value last, in both directions.
function sort(table) {
  if (sorted.column === null) return;
  const column = heads(table).indexOf(sorted.column);
  if (column < 0) return;
  const rank = (one) => (one === "-" ? 2 : typeof one === "number" ? 0 : 1);
  const rows = [...table.tBodies[0].rows].sort((first, second) => {
    const [a, b] = [value(first, column), value(second, column)];
    return rank(a) - rank(b) || (sorted.falling ? -compare(a, b) : compare(a, b));
  });
  table.tBodies[0].append(...rows);
  for (const [index, cell] of [...table.tHead.rows[0].cells].entries()) {
    const order = sorted.falling ? "descending" : "ascending";
    if (index === column) cell.setAttribute("aria-sort", order);
    else cell.removeAttribute("aria-sort");
  }
}

const HOLDS = {
  "=": (_, equal) => equal,
  "!=": (_, equal) => !equal,
  "<": (order) => order < 0,
  "<=": (order) => order <= 0,
  ">": (order) => order > 0,
  ">=": (order) => order >= 0,
};

// `lr<0.01 state=complete adam`: each word must hold; one without a sign may be in any cell.
function condition(word, names) {
  const [, name, sign, wanted] = /^(.*?)(<=|>=|!=|<|>|=)(.*)$/.exec(word) ?? [];
  if (sign === undefined) return (row) => row.textContent.toLowerCase().includes(word);
  const column = names.findIndex((one) => one.toLowerCase() === name);
  if (column < 0) return null;
  const number = wanted === "" ? NaN : Number(wanted);
  return (row) => {
    const [found, text] = [value(row, column), row.cells[column].textContent.toLowerCase()];
    const order = typeof found === "number" && !Number.isNaN(number) ? found - number : NaN;
    return HOLDS[sign](order, Number.isNaN(order) ? text === wanted : order === 0);
  };
}

function filter(table) {
  const input = table.closest("section").querySelector("input");
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  const names = heads(table);
  const conditions = words.map((word) => condition(word, names));
  const wrong = words.filter((_, index) => conditions[index] === null);
  const rows = [...table.tBodies[0].rows];
  for (const row of rows) row.hidden = !conditions.every((holds) => holds === null || holds(row));
  input.setCustomValidity(wrong.length ? "no such column" : "");
  const shown = rows.filter((row) => !row.hidden).length;
  input.nextElementSibling.textContent = wrong.length
    ? `there is no column for ${wrong.join(" ")}`
    : words.length ? `${shown} of ${rows.length}` : "";
}

function prepare(section) {
  for (const figure of section.querySelectorAll(".figure")) draw(figure);
  for (const table of section.querySelectorAll("table.sortable")) {
    sort(table);
    filter(table);
  }
}

// A figure keeps its zoom, and a table its order and filter.
function replace(old, fresh) {
  if (old.source === fresh.innerHTML) return;
  old.source = fresh.innerHTML;
  const parts = [".figure > script", "thead", "tbody"].filter((one) => fresh.querySelector(one));
  const same = (one) => old.querySelector(one);
  const isKept = fresh.querySelector(".figure, .sortable") && parts.every(same);
  if (!isKept) old.innerHTML = fresh.innerHTML;
  else for (const part of ["h2", "p", ...parts]) {
    old.querySelector(part)?.replaceWith(fresh.querySelector(part));
  }
  prepare(old);
}

function update(page) {
  const sections = [...page.querySelectorAll("main > section")];
  const known = new Map([...document.querySelectorAll("main > section")].map((s) => [s.id, s]));
  let before = null;
  for (const fresh of sections) {
    const old = known.get(fresh.id);
    known.delete(fresh.id);
    const section = old ?? document.importNode(fresh, true);
    const next = before ? before.nextElementSibling : document.querySelector("main").firstElementChild;
    if (next !== section) next ? next.before(section) : document.querySelector("main").append(section);
    if (old) replace(old, fresh);
    else start(section);
    before = section;
  }
  for (const gone of known.values()) gone.remove();
  document.querySelector("header").innerHTML = page.querySelector("header").innerHTML;
}

function start(section) {
  section.source = section.innerHTML;
  prepare(section);
}

async function poll(tag) {
  const state = () => document.querySelector(".live");
  try {
    if (document.hidden) return tag;
    const answer = await fetch(location.pathname, {headers: {"If-None-Match": tag}});
    if (answer.status === 200) {
      update(new DOMParser().parseFromString(await answer.text(), "text/html"));
      return answer.headers.get("ETag");
    }
    if (answer.status !== 304) state().textContent = await answer.text();
  } catch {
    state().textContent = "no longer live: sweep ui has ended";
  }
  return tag;
}

document.addEventListener("click", ({target}) => {
  const head = target.closest(".sortable th");
  if (head) {
    const falling = head.getAttribute("aria-sort") === "ascending";
    Object.assign(sorted, {column: head.textContent, falling});
    sort(head.closest("table"));
  }
  if (target.matches("button.copy")) {
    navigator.clipboard.writeText(target.previousElementSibling.textContent);
    target.textContent = "copied";
    setTimeout(() => { target.textContent = "copy"; }, 1500);
  }
});

document.addEventListener("input", ({target}) => {
  filter(target.closest("section").querySelector("table.sortable"));
});

document.addEventListener("DOMContentLoaded", async () => {
  for (const section of document.querySelectorAll("main > section")) start(section);
  if (!document.querySelector(".live")) return;
  for (let tag = ""; ; tag = await poll(tag)) {
    await new Promise((resolve) => { setTimeout(resolve, EVERY_MS); });
  }
});
