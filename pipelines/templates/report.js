"use strict";
(() => {
  // Everything that is shown goes in as text, never as HTML: keys are anybody's words.
  const WIDTH = 1.96;
  const FIRST = 12, STEP = 100;
  const UNCERTAIN = "too uncertain";
  const EMPTY = "(empty text)";
  const FORMULA = /^'*[=+\-@\t\r\n\uFF1D\uFF0B\uFF0D\uFF20]/;
  const root = document.documentElement;
  root.classList.add("js");

  const make = (tag, text, name) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (name) element.className = name;
    return element;
  };

  const human = (number) => {
    const size = Math.abs(number);
    if (size === 0) return "0";
    if (size < 1e-3 || size >= 1e12) {
      const [digits, power] = number.toExponential(2).split("e");
      return `${digits.replace(/\.?0+$/, "")}e${Number(power)}`;
    }
    if (size < 1) return String(Number(number.toPrecision(3)));
    const places = size >= 100 ? 0 : size >= 10 ? 1 : 2;
    return number.toLocaleString("en-US", { maximumFractionDigits: places });
  };

  const label = (key) => key.map((text) => text || EMPTY).join(" · ");

  const withError = (column, row) => {
    const value = column.values[row], sd = column.sds[row];
    return value === null || sd === null ? "–" : `${human(value)} ± ${human(WIDTH * sd)}`;
  };

  // A value that is not above zero is too uncertain as well: no share of it bounds its noise.
  const uncertain = (column, row, share) =>
    share !== null && !(column.values[row] > 0 && column.sds[row] <= share * column.values[row]);

  // --- the table ---------------------------------------------------------------------------

  // A served page comes again when there is something new, and then shows what it showed.
  const note = document.getElementById("live");
  const place = `dpstream ${location.pathname}`;
  const remembered = () => {
    try { return (note && JSON.parse(sessionStorage.getItem(place))) || {}; } catch { return {}; }
  };
  const remember = (state) => {
    try { if (note) sessionStorage.setItem(place, JSON.stringify(state)); } catch { /* none */ }
  };

  const table = (data) => {
    const view = document.getElementById("keys-table");
    const body = view.tBodies[0];
    const search = document.getElementById("search");
    const windows = document.getElementById("window");
    const count = document.getElementById("count");
    const more = document.getElementById("more");
    const back = document.getElementById("back");
    const lower = data.keys.map((key) => label(key).toLowerCase());
    // Of each key the last row of a complete window, or its last row where it has none.
    const last = new Map();
    data.key.forEach((key, row) => {
      if (data.complete[data.window[row]] || !last.has(key) || !data.complete[data.window[last.get(key)]])
        last.set(key, row);
    });
    const newest = data.key.map((key, row) => last.get(key) === row);
    const every = data.key.map((_, row) => row);
    const several = new Set(every.filter((row) => !newest[row]).map((row) => data.key[row]));
    const most = data.columns.map((column) =>
      column.values.reduce((top, value) => Math.max(top, Math.abs(value || 0)), 0));
    const names = data.keys.map((key) => JSON.stringify(key));
    const state = { search: "", window: "newest", sort: "", down: true, key: null, ...remembered() };
    state.key = state.key === null ? null : names.indexOf(state.key);
    if (state.key === -1) state.key = null;
    const found = data.starts.indexOf(state.window);
    if (!["newest", "all"].includes(state.window)) state.window = found < 0 ? "newest" : String(found);
    const space = document.querySelector("svg")?.namespaceURI; // the page names no address
    const drawn = space && several.size > 0 && data.starts.length > 2;
    let shown = FIRST;

    view.tHead.querySelector("th.over").hidden = !drawn;
    data.starts.forEach((name, place) => {
      const option = make("option", `from ${name}`);
      option.value = String(place);
      windows.append(option);
    });

    const order = () => {
      const [kind, place] = [state.sort[0], Number(state.sort.slice(1))];
      if (kind === "k") {
        const collator = new Intl.Collator("en", { numeric: true });
        return (a, b) => collator.compare(data.keys[data.key[a]][place], data.keys[data.key[b]][place]);
      }
      if (kind === "w") return (a, b) => data.window[a] - data.window[b];
      if (kind === "c") {
        const values = data.columns[place].values;
        return (a, b) => values[a] - values[b];
      }
      return null;
    };

    const chosen = () => {
      const text = state.search.trim().toLowerCase();
      const window = Number(state.window);
      const rows = every.filter((row) => {
        if (state.key !== null) return data.key[row] === state.key;
        if (text && !lower[data.key[row]].includes(text)) return false;
        if (state.window === "newest") return newest[row];
        return state.window === "all" || data.window[row] === window;
      });
      const compare = order();
      if (!compare) return rows;
      const missing = (row) =>
        state.sort[0] === "c" && data.columns[Number(state.sort.slice(1))].values[row] === null;
      const sign = state.down ? -1 : 1;
      return rows.sort((a, b) => missing(a) - missing(b) || sign * compare(a, b) || a - b);
    };

    // The first column of a key over all its windows, from 0; a missing window is a gap.
    const spark = (last) => {
      let first = last;
      while (first > 0 && data.key[first - 1] === data.key[last]) first -= 1;
      const values = data.columns[0].values;
      const [low, high] = every.slice(first, last + 1).reduce(
        ([a, b], row) => uncertain(data.columns[0], row, data.share) ? [a, b]
          : [Math.min(a, values[row] ?? 0), Math.max(b, values[row] ?? 0)], [0, 1e-9]);
      let path = "", before = NaN;
      for (let row = first; row <= last; row += 1) {
        if (values[row] === null || uncertain(data.columns[0], row, data.share)) continue;
        const x = (100 * data.window[row] / (data.starts.length - 1)).toFixed(1);
        const y = (22 - 20 * (values[row] - low) / (high - low)).toFixed(1);
        path += `${data.window[row] === before + 1 ? "L" : "M"}${x} ${y}h.01`;
        before = data.window[row];
      }
      const svg = document.createElementNS(space, "svg");
      svg.setAttribute("viewBox", "0 0 100 24");
      svg.setAttribute("preserveAspectRatio", "none");
      svg.setAttribute("class", "spark");
      svg.setAttribute("aria-hidden", "true");
      const stroke = document.createElementNS(space, "path");
      stroke.setAttribute("d", path);
      svg.append(stroke);
      return svg;
    };

    const line = (row) => {
      const tr = make("tr");
      const key = data.key[row];
      data.keys[key].forEach((text, place) => {
        const cell = make(place ? "td" : "th");
        if (!place) cell.scope = "row";
        const bdi = make("bdi", text || EMPTY);
        if (!place && state.key === null && several.has(key)) {
          const button = make("button", undefined, "plain");
          button.type = "button";
          button.title = "Every window of this key";
          button.dataset.key = String(key);
          button.append(bdi);
          cell.append(button);
        } else cell.append(bdi);
        tr.append(cell);
      });
      data.columns.forEach((column, place) => {
        const text = withError(column, row), hidden = text !== "–" && uncertain(column, row, data.share);
        const cell = make("td", hidden ? UNCERTAIN : text, hidden ? "n soft" : "n");
        tr.append(cell);
        if (hidden) return;
        const track = make("span", undefined, "track");
        const bar = make("span", undefined, "bar");
        bar.style.width = `${most[place] ? 100 * Math.abs(column.values[row] || 0) / most[place] : 0}%`;
        track.append(bar);
        cell.append(track);
      });
      const when = make("td", data.starts[data.window[row]], "when");
      when.title = `${data.starts[data.window[row]]} to ${data.ends[data.window[row]]}`;
      tr.append(when);
      if (drawn) {
        const cell = make("td");
        if (newest[row] && several.has(key)) cell.append(spark(row));
        tr.append(cell);
      }
      return tr;
    };

    const draw = () => {
      const rows = chosen();
      body.replaceChildren(...rows.slice(0, shown).map(line));
      const some = Math.min(shown, rows.length);
      count.textContent = rows.length === 0 ? "No row matches."
        : `${some.toLocaleString("en-US")} of ${rows.length.toLocaleString("en-US")} rows`;
      more.hidden = rows.length <= shown;
      more.textContent = `Show ${Math.min(STEP, rows.length - shown).toLocaleString("en-US")} more`;
      back.hidden = state.key === null;
      if (state.key !== null) {
        back.textContent = `× Every window of ${label(data.keys[state.key])}`;
      }
      for (const head of view.tHead.querySelectorAll("th[data-sort]")) {
        const mine = head.dataset.sort === state.sort;
        if (mine) head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      }
      const window = data.starts[Number(state.window)] ?? state.window;
      const { experts: opened } = remembered();
      remember({ ...state, window, key: state.key === null ? null : names[state.key], experts: opened });
    };

    const change = (what) => {
      Object.assign(state, what);
      shown = STEP;
      draw();
    };

    const csv = () => {
      const text = (word) => `"${String(word).replaceAll('"', '""')}"`;
      // A spreadsheet would compute such text; releases as CSV are written the same way.
      const safe = (word) => text(FORMULA.test(word) ? `'${word}` : word);
      const number = (value) => (value === null ? "" : String(value));
      const heads = [...data.names, "window_start", "window_end"];
      const marked = data.share !== null;
      data.columns.forEach(({ title }) =>
        heads.push(title, `${title}_sd`, ...(marked ? [`${title}_too_uncertain`] : [])));
      const lines = chosen().map((row) => [
        ...data.keys[data.key[row]].map((word, i) => (data.texts[i] ? safe(word) : text(word))),
        data.from[data.window[row]],
        data.to[data.window[row]],
        ...data.columns.flatMap((c) => [number(c.values[row]), number(c.sds[row]),
          ...(marked ? [String(uncertain(c, row, data.share))] : [])]),
      ].join(","));
      const blob = new Blob([[heads.map(safe).join(","), ...lines, ""].join("\n")], { type: "text/csv" });
      const link = make("a");
      link.href = URL.createObjectURL(blob);
      link.download = data.file;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
    };

    search.value = state.search;
    windows.value = state.window;
    search.addEventListener("input", () => change({ search: search.value, key: null }));
    windows.addEventListener("change", () => change({ window: windows.value, key: null }));
    more.addEventListener("click", () => { shown += STEP; draw(); });
    // Paper has no button for more.
    addEventListener("beforeprint", () => { shown = Math.max(shown, STEP); draw(); });
    back.addEventListener("click", () => change({ key: null }));
    document.getElementById("csv").addEventListener("click", csv);
    view.tHead.addEventListener("click", (event) => {
      const head = event.target.closest("th[data-sort]");
      if (!head) return;
      const again = head.dataset.sort === state.sort;
      change({ sort: head.dataset.sort, down: again ? !state.down : head.dataset.sort[0] !== "k" });
    });
    body.addEventListener("click", (event) => {
      const button = event.target.closest("button[data-key]");
      if (button) change({ key: Number(button.dataset.key) });
    });
    draw();
  };

  // --- values under the pointer, or by arrow keys ------------------------------------------

  const tips = (plot) => {
    const points = JSON.parse(plot.dataset.tips);
    const tip = make("div", "", "tip");
    const dot = make("div", undefined, "dot");
    tip.setAttribute("role", "status");
    let at = -1;
    const show = (place) => {
      at = place;
      const [x, y, words] = points[place];
      const box = plot.getBoundingClientRect();
      plot.append(dot, tip);
      dot.style.left = `${100 * x}%`;
      dot.style.top = `${100 * y}%`;
      tip.textContent = words;
      const left = Math.min(Math.max(0, x * box.width - tip.offsetWidth / 2), box.width - tip.offsetWidth);
      tip.style.left = `${Math.max(0, left)}px`;
      tip.style.top = `${y * box.height > tip.offsetHeight + 14 ? y * box.height - tip.offsetHeight - 10 : y * box.height + 12}px`;
    };
    const hide = () => { at = -1; dot.remove(); tip.remove(); };
    const nearest = (event) => {
      const box = plot.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width;
      const y = (event.clientY - box.top) / box.height;
      let best = 0, least = Infinity;
      points.forEach((point, place) => {
        const far = 100 * Math.abs(point[0] - x) + Math.abs(point[1] - y);
        if (far < least) [best, least] = [place, far];
      });
      show(best);
    };
    plot.addEventListener("pointermove", nearest);
    plot.addEventListener("pointerdown", nearest);
    plot.addEventListener("pointerleave", hide);
    plot.addEventListener("blur", hide);
    plot.addEventListener("focus", () => { if (at < 0) show(points.length - 1); });
    plot.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      show(Math.min(points.length - 1, Math.max(0, at + step)));
    });
  };

  // --- a served page looks again -----------------------------------------------------------

  const live = (note) => {
    const look = async () => {
      let wait = 3000;
      try {
        const answer = await fetch("state", { cache: "no-store" });
        if (!answer.ok) throw new Error(String(answer.status));
        const now = await answer.json();
        wait = 1000 * now.seconds;
        if (now.version !== note.dataset.version) return location.reload();
        note.textContent = "Live: this page looks for new releases.";
      } catch {
        note.textContent = "The server of this page has ended; it shows the last releases it saw.";
      }
      setTimeout(look, wait);
    };
    setTimeout(look, 1000);
  };

  // --- what was open stays open when a served page comes again --------------------------------

  const experts = document.getElementById("experts");
  if (experts) {
    experts.open = Boolean(remembered().experts);
    experts.addEventListener("toggle", () => remember({ ...remembered(), experts: experts.open }));
  }

  const data = document.getElementById("data");
  if (data) table(JSON.parse(data.textContent));
  document.querySelectorAll("[data-tips]").forEach(tips);
  if (note) live(note);
})();
