"use strict";
(() => {
  const PAGE = 100;
  const FAILED = new Set(["failed_numeric", "failed_shape", "failed_nonfinite", "failed_nondeterministic", "error", "crash", "hang", "stale_waiver"]);
  const IDLE = new Set(["skipped", "unsupported", "excluded", "not_run"]);
  const make = (tag, props = {}, ...inside) => {
    const node = Object.assign(document.createElement(tag), props);
    node.append(...inside);
    return node;
  };

  /* The register's text is the data: one line for each case. */
  const data = JSON.parse(document.getElementById("figures").textContent);
  const cases = [];
  const axes = new Map();
  const note = (axis, level) => {
    if (!axes.has(axis)) axes.set(axis, new Set());
    axes.get(axis).add(level);
  };
  for (const pre of document.querySelectorAll("pre.register")) {
    const { check, subject } = pre.dataset;
    const [head, ...lines] = pre.textContent.split("\n");
    const names = head.split("\t").slice(5);
    for (const line of lines) {
      if (!line) continue;
      const [verdict, margin, ref, regime, seed, ...levels] = line.split("\t");
      const at = { check, regime, verdict, subject };
      names.forEach((name, i) => { at[name] = levels[i]; });
      const cell = names.map((name, i) => name + ":" + levels[i]).join(",");
      const id = subject + "/" + check + "[" + cell + "]" + regime + "#" + seed;
      cases.push({ id, at, verdict, margin, ref, figures: data.rows[cases.length], text: (id + " " + verdict).toLowerCase() });
    }
  }
  for (const c of cases) for (const axis in c.at) note(axis, c.at[axis]);

  /* Copy buttons. */
  const copying = (button, text) => button.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(text); button.textContent = "Copied"; } catch { button.textContent = "Select it"; }
  });
  for (const button of document.querySelectorAll("button.copy")) {
    button.hidden = false;
    copying(button, button.previousElementSibling.textContent);
  }

  /* The register as a table with search, filters and pages. */
  const browser = document.getElementById("browser");
  const search = make("input", { type: "search", size: 34, placeholder: "dtype:bf16 dg …" });
  const pick = (options) => {
    const select = make("select");
    for (const [value, label] of options) select.append(make("option", { value, textContent: label }));
    return select;
  };
  const verdicts = pick([["", "all"], ["failed", "failed"], ...[...axes.get("verdict") || []].sort().map(v => [v, v.replaceAll("_", " ")])]);
  const order = pick([["plan", "as planned"], ["margin", "tightest margin first"]]);
  const chips = make("ul", { className: "chips" });
  const status = make("p", { className: "soft" });
  status.setAttribute("role", "status");
  const rows = make("tbody");
  const table = make("table", { id: "table", className: "wide" },
    make("thead", {}, make("tr", {}, ...["case", "verdict", "margin", "note"].map((name, i) =>
      make("th", { scope: "col", textContent: name, className: i === 2 ? "n" : "" })))), rows);
  const back = make("button", { type: "button", textContent: "Previous" });
  const next = make("button", { type: "button", textContent: "Next" });
  const labelled = (words, control) => make("label", {}, words, control);
  browser.append(
    make("div", { className: "controls" }, labelled("search ids (every word must occur)", search), labelled("verdict", verdicts), labelled("order", order)),
    chips, status, make("div", { className: "scroll", tabIndex: 0 }, table), make("div", { className: "controls" }, back, next));
  document.getElementById("register").hidden = true;
  browser.hidden = false;

  let filters = [];
  let found = cases;
  let from = 0;
  const weight = (c) => c.margin === "" ? -1 : c.margin === "NaN" || c.margin === "∞" ? Infinity : Number(c.margin.replaceAll(",", ""));

  const quoted = (word) => "'" + word.replaceAll("'", "'\\''") + "'";
  const detail = (c) => {
    const box = make("td", { colSpan: 4 });
    const given = data.given[c.at.subject];
    const command = "qualify rerun " + quoted(c.id) + (given ? " --subject " + quoted(given) : "");
    const button = make("button", { type: "button", textContent: "Copy" });
    copying(button, command);
    box.append(make("div", { className: "command" }, make("pre", { textContent: command }), button));
    if (!c.figures) {
      box.append(make("p", { className: "soft", textContent: c.margin === "" ? "Nothing was compared." : "Its figures are in receipt.json." }));
    } else {
      const body = make("tbody");
      for (const part of c.figures.split(";")) {
        const [name, error, margin] = part.split(" ");
        const [tensor, metric] = data.names[Number(name)];
        body.append(make("tr", {}, make("th", { scope: "row", textContent: tensor }), make("td", { textContent: metric }),
          make("td", { className: "n", textContent: error }), make("td", { className: "n", textContent: margin })));
      }
      box.append(make("table", {}, make("caption", { textContent: "The tightest comparison of each tensor; all are in receipt.json." }),
        make("thead", {}, make("tr", {}, ...["tensor", "metric", "error", "margin"].map((name, i) =>
          make("th", { scope: "col", textContent: name, className: i > 1 ? "n" : "" })))), body));
    }
    return make("tr", { className: "opened" }, box);
  };

  const reference = (ref) => {
    if (!ref) return "";
    const target = (ref[0] === "N" ? "n-" : "f-") + ref.slice(1);
    return document.getElementById(target) ? make("a", { href: "#" + target, textContent: ref }) : ref;
  };

  const row = (c) => {
    const button = make("button", { type: "button" });
    c.id.split(/(?<=[,\[\]])/).forEach((part) => button.append(part, make("wbr")));
    button.setAttribute("aria-expanded", "false");
    const line = make("tr", {}, make("td", {}, button),
      make("td", { textContent: c.verdict.replaceAll("_", " "), className: FAILED.has(c.verdict) ? "fail" : IDLE.has(c.verdict) ? "idle" : c.verdict === "passed" ? "pass" : "warn" }),
      make("td", { className: "n", textContent: c.margin || "–" }), make("td", {}, reference(c.ref)));
    button.addEventListener("click", () => {
      const open = button.getAttribute("aria-expanded") === "true";
      button.setAttribute("aria-expanded", String(!open));
      if (open) line.nextElementSibling.remove(); else line.after(detail(c));
    });
    return line;
  };

  const show = () => {
    const page = found.slice(from, from + PAGE);
    rows.replaceChildren(...page.map(row));
    back.disabled = from === 0;
    next.disabled = from + PAGE >= found.length;
    status.textContent = found.length
      ? (from + 1) + " to " + (from + page.length) + " of " + found.length.toLocaleString("en") + (found.length === cases.length ? " cases" : " matching cases, of " + cases.length.toLocaleString("en"))
      : "No case matches.";
  };

  const apply = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = verdicts.value;
    found = cases.filter((c) =>
      (!wanted || (wanted === "failed" ? FAILED.has(c.verdict) : c.verdict === wanted)) &&
      filters.every(([axis, level]) => (c.at[axis] ?? "–") === level) &&
      words.every((word) => c.text.includes(word)));
    if (order.value === "margin") found = [...found].sort((a, b) => weight(b) - weight(a));
    from = 0;
    chips.replaceChildren(...filters.map(([axis, level]) => {
      const button = make("button", { type: "button", textContent: axis + ": " + level + " ×" });
      button.prepend(make("span", { className: "vh", textContent: "Remove the filter " }));
      button.addEventListener("click", () => { filters = filters.filter((f) => f[0] !== axis); apply(); });
      return make("li", {}, button);
    }));
    show();
  };
  search.addEventListener("input", apply);
  verdicts.addEventListener("change", apply);
  order.addEventListener("change", apply);
  back.addEventListener("click", () => { from -= PAGE; show(); });
  next.addEventListener("click", () => { from += PAGE; show(); });

  /* The map along axes of the reader's choice. */
  const controls = document.getElementById("map-controls");
  const host = document.getElementById("map");
  const known = ["check", "regime", ...[...axes.keys()].filter((a) => !["check", "regime", "verdict", "subject"].includes(a)), "subject", "verdict"];
  const heads = host.querySelector(".label").textContent.split(" \\ ");
  const rowAxis = pick(known.map((a) => [a, a]));
  const columnAxis = pick(known.map((a) => [a, a]));
  rowAxis.value = heads[0];
  columnAxis.value = heads[1];
  controls.append(labelled("rows", rowAxis), labelled("columns", columnAxis), make("p", { className: "soft", textContent: "Choose a cell to list its cases." }));
  controls.hidden = false;
  const natural = new Intl.Collator("en", { numeric: true }).compare;
  const sorted = (levels, axis) => {
    const planned = data.axes[axis] || [];
    const place = (level) => planned.includes(level) ? planned.indexOf(level) : planned.length;
    return [...levels].sort((a, b) => place(a) - place(b) || natural(a, b));
  };
  const STEPS = [0, 0.25, 0.5, 0.75, 0.9];

  const draw = () => {
    const cells = new Map(), lefts = new Set(), tops = new Set();
    for (const c of cases) {
      const left = c.at[rowAxis.value] ?? "–", top = c.at[columnAxis.value] ?? "–";
      lefts.add(left); tops.add(top);
      const key = JSON.stringify([left, top]);
      if (!cells.has(key)) cells.set(key, { planned: 0, executed: 0, failed: 0, waived: 0, margin: -1 });
      const t = cells.get(key);
      t.planned += 1;
      t.executed += !IDLE.has(c.verdict) && c.verdict !== "stale_waiver";
      t.failed += FAILED.has(c.verdict);
      t.waived += c.verdict === "waived";
      if (c.verdict === "passed") t.margin = Math.max(t.margin, weight(c));
    }
    const columns = sorted(tops, columnAxis.value);
    const body = make("tbody");
    for (const left of sorted(lefts, rowAxis.value)) {
      const line = make("tr", {}, make("th", { scope: "row", textContent: left }));
      for (const top of columns) {
        const t = cells.get(JSON.stringify([left, top]));
        if (!t) {
          const dot = make("span", { className: "faint", textContent: "·" });
          line.append(make("td", {}, dot));
          continue;
        }
        const state = t.failed ? "failed" : t.waived ? "waived" : !t.executed ? "none" : "m" + STEPS.filter((s) => t.margin > s).length;
        const words = t.failed ? "✕ " + t.failed : t.waived ? "waived " + t.waived : !t.executed ? "not run" : t.margin <= 0 ? "exact" : t.margin.toFixed(2);
        const button = make("button", { type: "button" }, make("span", { className: "vh", textContent: left + ", " + top + ": " }), words,
          make("small", { textContent: t.executed + "/" + t.planned }), make("span", { className: "vh", textContent: " executed; list the cases" }));
        button.addEventListener("click", () => {
          filters = rowAxis.value === columnAxis.value ? [[rowAxis.value, left]] : [[rowAxis.value, left], [columnAxis.value, top]];
          search.value = ""; verdicts.value = "";
          apply();
          document.getElementById("cases").scrollIntoView();
          rows.querySelector("button")?.focus({ preventScroll: true });
        });
        line.append(make("td", { className: state }, button));
      }
      body.append(line);
    }
    const corner = make("th", { scope: "col" }, make("span", { className: "label", textContent: rowAxis.value + " \\ " + columnAxis.value }));
    host.replaceChildren(make("table", { className: "map" },
      make("caption", { textContent: rowAxis.value + " by " + columnAxis.value }),
      make("thead", {}, make("tr", {}, corner, ...columns.map((top) => make("th", { scope: "col", textContent: top })))), body));
  };
  rowAxis.addEventListener("change", draw);
  columnAxis.addEventListener("change", draw);
  draw();
  apply();

  /* What does not scroll needs no stop on the keyboard's way. */
  const stops = () => {
    for (const node of document.querySelectorAll(".scroll, pre.lines")) node.tabIndex = node.scrollWidth > node.clientWidth || node.scrollHeight > node.clientHeight ? 0 : -1;
  };
  stops();
  addEventListener("resize", stops);
  document.documentElement.dataset.ready = "true";
})();
