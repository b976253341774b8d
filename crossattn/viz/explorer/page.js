// What the reader does: hover, focus and click, and what the page then shows.

const MARKS = /^(<\/?[^>]*>|\[[A-Z]+\])$/; // </s>, [SEP]

// Writes tokens as buttons and returns them; arrows move among them.
function written(text, tokens, pick) {
  const buttons = tokens.map(([token], i) => {
    const button = element("button", { type: "button", textContent: token || " ", tabIndex: i ? -1 : 0 });
    button.dataset.at = i;
    button.classList.toggle("mark", MARKS.test(token));
    button.onpointerenter = () => pick(i);
    button.onpointerleave = () => pick(null);
    button.onfocus = () => pick(i);
    button.onblur = () => pick(null);
    button.onclick = () => pick(i, true);
    button.onkeydown = (event) => {
      const back = text.dir === "rtl" ? "ArrowRight" : "ArrowLeft", on = text.dir === "rtl" ? "ArrowLeft" : "ArrowRight";
      const next = { [back]: i - 1, [on]: i + 1, Home: 0, End: tokens.length - 1 }[event.key];
      if (next === undefined || !buttons[next]) return;
      event.preventDefault();
      button.tabIndex = -1, buttons[next].tabIndex = 0;
      buttons[next].focus();
    };
    return button;
  });
  text.replaceChildren(); // the tokens of a word stay together on a line
  buttons.forEach((button, i) => {
    if (tokens[i][1] || !i) text.append(" ", element("span"));
    text.lastElementChild.append(button);
  });
  return buttons;
}

const NOTHING = { token: null, place: null };

const page = {
  views: data.views.map(opened),
  view: null, buttons: [], layer: null, head: null, out: null, shows: "lines",
  pinned: NOTHING, focus: NOTHING,

  get memory() { return memories[this.view.kind]; },
  get both() { return this.view.kind === "words"; },

  open(index) {
    const view = (this.view = this.views[index]);
    Object.assign(this, { layer: null, head: null, out: null, pinned: NOTHING, focus: NOTHING });
    at("tools").hidden = at("stage").hidden = false; // of a served page before its first view
    at("stage").className = view.kind;
    at("shows").hidden = !this.both;
    at("memory").replaceChildren();
    this.memory.show(view, at("memory"), (place, pin) => this.look({ token: null, place }, pin));
    at("words").className = "text";
    at("words").dir = view.rtl ? "rtl" : "ltr";
    this.buttons = written(at("words"), view.tokens, (token, pin) => {
      if (pin && view.kind === "sound") this.memory.play(view, token);
      this.look({ token, place: null }, pin);
    });
    this.choices(at("layer"), "mean of all", view.L);
    this.choices(at("head"), "mean of all", view.N);
    this.choices(at("view"), null, this.views.length, (i) => `${i + 1}. ${this.views[i].name}`);
    at("view").value = index;
    this.buildHeads();
    this.draw();
  },

  choices(select, mean, count, name = String) {
    select.parentElement.hidden = count < 2;
    const numbers = [...Array(count).keys()].map((i) => new Option(name(i), i));
    select.replaceChildren(...(mean === null ? [] : [new Option(mean, "")]), ...numbers);
  },

  // Looks at a word or a place of the memory; a click pins it, and the same click again lets it go.
  look(focus, pin = false) {
    if (pin) {
      const same = this.pinned.token === focus.token && this.pinned.place === focus.place;
      this.pinned = same ? NOTHING : focus;
    }
    const before = this.focus, none = focus.token === null && focus.place === null;
    this.focus = none ? this.pinned : focus;
    if (pin || before.token !== this.focus.token || before.place !== this.focus.place) this.draw();
  },

  choose(layer, head) {
    [this.layer, this.head] = [layer, head];
    at("layer").value = layer ?? "", at("head").value = head ?? "";
    this.draw();
  },

  // The weights of a head that are in focus: a row of a word, or what each word reads of a place.
  read(layer, head) {
    const { token, place } = this.focus;
    if (token !== null) return this.view.row(layer, head, token);
    return place === null ? null : this.view.column(layer, head, place);
  },

  draw() {
    const { view, focus } = this, weights = this.read(this.layer, this.head);
    const alone = view.kind === "page"; // its words are the places themselves
    this.memory.draw(view, focus.token !== null || alone ? weights : null, focus);
    const most = weights && focus.place !== null ? largest(weights) : 1;
    this.buttons.forEach((button, t) => {
      const reads = weights && focus.place !== null ? (0.75 * weights[t]) / most : 0;
      button.style.setProperty("--share", reads);
      button.classList.toggle("chosen", focus.token === t);
    });
    this.drawLines(weights);
    this.drawMatrix();
    this.drawHeads();
    this.say(weights);
  },

  drawLines(weights) {
    const lines = at("lines"), { view, focus } = this;
    lines.replaceChildren();
    if (!this.both || this.shows !== "lines") return;
    const frame = at("stage").getBoundingClientRect(), box = (button) => button.getBoundingClientRect();
    const draw = (t, s, share, thick) => {
      const from = box(this.memory.buttons[s]), to = box(this.buttons[t]);
      const [x, y] = [from.left + from.width / 2 - frame.left, from.bottom - frame.top];
      const [u, v] = [to.left + to.width / 2 - frame.left, to.top - frame.top];
      const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
      path.setAttribute("d", `M${x},${y}C${x},${(y + v) / 2} ${u},${(y + v) / 2} ${u},${v}`);
      path.setAttribute("stroke-opacity", share), path.setAttribute("stroke-width", thick * (0.4 + 4 * share));
      lines.append(path);
    };
    if (focus.token !== null) weights.forEach((share, s) => share > 0.02 && draw(focus.token, s, share, 1.3));
    else if (focus.place !== null) weights.forEach((share, t) => share > 0.02 && draw(t, focus.place, share, 1.3));
    else
      for (let t = 0; t < view.T; t++)
        view.row(this.layer, this.head, t).forEach((share, s) => share > 0.1 && draw(t, s, 0.75 * share, 0.8));
  },

  drawMatrix() {
    const { view } = this, shown = this.both && this.shows === "matrix";
    at("matrix").hidden = !shown;
    at("stage").classList.toggle("matrix", shown);
    if (!shown) return;
    const canvas = at("matrix").firstElementChild, label = 96, above = 84;
    const size = Math.max(9, Math.min(34, (at("stage").clientWidth - 60 - label) / view.S));
    const high = Math.min(size, 26), font = Math.min(13, high - 1);
    const wide = label + size * view.S + 24, tall = above + high * view.T + 2;
    canvas.style.width = `${wide}px`, canvas.style.height = `${tall}px`;
    const [pen] = brush(canvas, wide, tall);
    pen.font = `${font}px system-ui, "DejaVu Sans", sans-serif`, pen.textBaseline = "middle";
    const cut = (text) => (text.length > 12 ? `${text.slice(0, 11)}…` : text);
    view.memory.tokens.forEach(([token], s) => {
      pen.save(), pen.translate(label + (s + 0.5) * size, above - 6), pen.rotate(-0.9);
      pen.fillStyle = colour(this.focus.place === s ? "focus" : "ink"), pen.textAlign = "left";
      pen.fillText(cut(token), 0, 0), pen.restore();
    });
    for (let t = 0; t < view.T; t++) {
      const y = above + t * high, chosen = this.focus.token === t;
      pen.fillStyle = colour(chosen ? "focus" : "ink"), pen.textAlign = "right";
      pen.fillText(cut(view.tokens[t][0]), label - 8, y + high / 2);
      view.row(this.layer, this.head, t).forEach((share, s) => {
        pen.fillStyle = heat(Math.min(1, share)), pen.fillRect(label + s * size, y, size - 1, high - 1);
      });
    }
    pen.strokeStyle = colour("line"), pen.strokeRect(label - 0.5, above - 0.5, size * view.S, high * view.T);
    pen.strokeStyle = colour("focus"), pen.lineWidth = 2;
    const { token, place } = this.focus;
    if (token !== null) pen.strokeRect(label, above + token * high, size * view.S - 1, high - 1);
    if (place !== null) pen.strokeRect(label + place * size, above, size - 1, high * view.T - 1);
    const row = (event) => {
      const t = Math.floor((event.offsetY - above) / high);
      return 0 <= t && t < view.T && event.offsetX > label ? t : null;
    };
    canvas.onpointermove = (event) => row(event) !== this.focus.token && this.look({ token: row(event), place: null });
    canvas.onpointerleave = () => this.look(NOTHING);
    canvas.onclick = (event) => row(event) !== null && this.look({ token: row(event), place: null }, true);
  },

  buildHeads() {
    const { view } = this, strip = at("heads"), outs = view.knockouts;
    strip.style.gridTemplateColumns = `auto repeat(${view.N}, minmax(64px, ${view.kind === "page" ? 120 : 260}px))`;
    strip.classList.toggle("tall", view.kind === "picture" || view.kind === "page");
    strip.replaceChildren();
    strip.hidden = at("about").hidden = view.L * view.N === 1;
    at("about").textContent = "All heads; a click chooses one."
      + (outs ? " The numbers are the change of the mean log-probability without the head; a click knocks it out." : "");
    for (let l = 0; l < view.L; l++) {
      strip.append(element("h2", { textContent: `layer ${l}` }));
      for (let n = 0; n < view.N; n++) {
        const pick = element("button", { type: "button", title: `layer ${l}, head ${n}` }, element("canvas"));
        pick.setAttribute("aria-label", `layer ${l}, head ${n}`);
        pick.onclick = () => (this.layer === l && this.head === n ? this.choose(null, null) : this.choose(l, n));
        const card = element("div", { className: "head" }, pick);
        if (outs) {
          const out = element("button", { type: "button", className: "out", textContent: signed(outs.loss[l][n]) });
          out.title = `knock out layer ${l}, head ${n}: mean log-probability ${signed(outs.loss[l][n])}`;
          out.setAttribute("aria-label", out.title);
          out.onclick = () => this.knock(l, n);
          card.append(out);
        }
        strip.append(card);
      }
    }
  },

  drawHeads() {
    const { view } = this;
    [...at("heads").querySelectorAll(".head")].forEach((card, i) => {
      const [l, n] = [Math.floor(i / view.N), i % view.N], [pick, out] = card.children;
      pick.setAttribute("aria-pressed", this.layer === l && this.head === n);
      out?.setAttribute("aria-pressed", this.out?.[0] === l && this.out?.[1] === n);
      const [pen, w, h] = brush(pick.firstElementChild), weights = this.read(l, n);
      if (weights && (this.focus.token !== null || view.kind === "page")) this.memory.thumb(view, pen, weights, w, h);
      else if (weights) cells(pen, weights, 1, view.T, w, h);
      else {
        const all = new Float32Array(view.T * view.S);
        for (let t = 0; t < view.T; t++) {
          const row = view.row(l, n, t), most = largest(row);
          row.forEach((share, s) => (all[t * view.S + s] = share / most));
        }
        cells(pen, all, view.T, view.S, w, h);
      }
    });
  },

  // Shows what the model says without a head, or with all of them again.
  knock(l, n) {
    const outs = this.view.knockouts, same = this.out?.[0] === l && this.out?.[1] === n;
    this.out = same ? null : [l, n];
    this.buttons.forEach((button, t) => {
      button.querySelector("small")?.remove();
      const instead = this.out && outs.instead?.[l][n][t];
      button.classList.toggle("lost", Boolean(instead));
      if (instead) button.append(element("small", { textContent: instead }));
    });
    this.draw();
  },

  say(weights) {
    const { view, focus } = this, said = at("said"), parts = [], bold = (text) => element("b", { textContent: text });
    const head = this.layer === null && this.head === null ? "mean of all heads"
      : `${this.layer === null ? "all layers" : `layer ${this.layer}`}, ${this.head === null ? "all heads" : `head ${this.head}`}`;
    const best = weights && [...weights.keys()].sort((a, b) => weights[b] - weights[a]).slice(0, 4);
    const share = (i) => ` ${weights[i].toFixed(2)}`;
    if (focus.token !== null) {
      parts.push(bold(`“${view.tokens[focus.token][0]}”`), " reads ");
      if (this.memory.reading) parts.push(...this.memory.reading(view, weights));
      else best.forEach((s, k) => parts.push(k ? ", " : "", bold(this.memory.name(view, s)), share(s)));
    } else if (focus.place !== null) {
      parts.push(bold(this.memory.name(view, focus.place)), " is read by ");
      best.forEach((t, k) => parts.push(k ? ", " : "", bold(`“${view.tokens[t][0]}”`), share(t)));
    }
    if (parts.length) parts.push(` (${head}).`);
    else if (!this.out) parts.push(`Point at a word, or walk with the arrow keys; a click keeps it${view.memory.audio ? " and plays the sound from there" : ""}. Shown: ${head}.`);
    if (this.out) {
      const [l, n] = this.out, outs = view.knockouts;
      parts.push(parts.length ? " " : "", bold(`Without layer ${l}, head ${n}`), ": mean log-probability ", signed(outs.loss[l][n]));
      if (focus.token !== null) parts.push(`; “${view.tokens[focus.token][0]}” from ${outs.whole[focus.token].toFixed(3)} to ${outs.probabilities[l][n][focus.token].toFixed(3)}`);
      if (outs.instead) parts.push(`; ${outs.instead[l][n].filter(Boolean).length} of ${view.T} tokens would be others`);
      parts.push(".");
    }
    said.replaceChildren(...parts);
  },
};

const signed = (number) => (Math.abs(number) < 0.005 ? "0.00" : `${number < 0 ? "−" : "+"}${Math.abs(number).toFixed(2)}`);
const number = (select) => (select.value === "" ? null : Number(select.value));
at("view").onchange = () => page.open(number(at("view")));
at("layer").onchange = at("head").onchange = () => page.choose(number(at("layer")), number(at("head")));
for (const button of at("shows").children)
  button.onclick = () => {
    page.shows = button.dataset.show;
    for (const each of at("shows").children) each.setAttribute("aria-pressed", each === button);
    page.draw();
  };
document.addEventListener("keydown", (event) => event.key === "Escape" && (page.pinned = NOTHING, page.look(NOTHING)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const name in colours) delete colours[name];
  page.draw();
});
new ResizeObserver(() => page.view && page.draw()).observe(at("stage"));
