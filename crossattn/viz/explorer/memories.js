// The four kinds of memory. Each has show(view, area, pick), which builds its elements, draw(view, weights, focus), which
// lights up what is read, thumb(view, canvas context, weights, w, h) for a head, and name(view, s) of a place.

const colours = {}; // of the style, asked for once; page.js forgets them where the system turns dark or light
const colour = (name) =>
  (colours[name] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`));
const heat = (share, name = "heat") => `rgb(${colour(name)} / ${share.toFixed(3)})`;
const glow = (share) => heat(share, "glow"); // the same over pictures, which the page makes dark
const largest = (weights) => weights.reduce((most, x) => Math.max(most, x), 1e-9);

function element(tag, options = {}, ...children) {
  const made = Object.assign(document.createElement(tag), options);
  made.append(...children);
  return made;
}

// A canvas with as many pixels as the screen has, empty; its width and height in CSS pixels.
function brush(canvas, width = canvas.clientWidth, height = canvas.clientHeight) {
  const dense = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * dense));
  canvas.height = Math.max(1, Math.round(height * dense));
  const pen = canvas.getContext("2d");
  pen.scale(dense, dense);
  return [pen, width, height];
}

// The rectangle of cell i of a grid, in whole pixels, so that neighbours neither overlap nor part.
function cell(i, rows, columns, width, height) {
  const x = i % columns, y = Math.floor(i / columns);
  const [left, right] = [x, x + 1].map((edge) => Math.round((edge * width) / columns));
  const [top, bottom] = [y, y + 1].map((edge) => Math.round((edge * height) / rows));
  return [left, top, right - left, bottom - top];
}

// A grid of weights, the largest in full colour: a picture of a pixel a cell, drawn larger.
function cells(pen, weights, rows, columns, width, height) {
  const most = largest(weights), image = new ImageData(columns, rows), small = element("canvas", { width: columns, height: rows });
  const [red, green, blue] = colour("heat").trim().split(" ").map(Number);
  weights.forEach((share, i) => image.data.set([red, green, blue, (255 * share) / most], 4 * i));
  small.getContext("2d").putImageData(image, 0, 0);
  pen.imageSmoothingEnabled = columns > 2 * width; // else every cell keeps its edges
  pen.drawImage(small, 0, 0, width, height);
}

// A picture with a canvas over it, where the pointer picks a place.
function pictured(area, image, label, placeOf, pick) {
  const canvas = element("canvas"), shown = element("img", { src: image, alt: label });
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return placeOf((event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
  };
  canvas.onpointermove = (event) => pick(place(event));
  canvas.onpointerleave = () => pick(null);
  canvas.onclick = (event) => pick(place(event), true);
  area.append(element("div", { className: "area" }, shown, canvas));
  return canvas;
}

const memories = {
  words: {
    show(view, area, pick) {
      const text = element("p", { className: "text", dir: view.memory.rtl ? "rtl" : "ltr", lang: "" });
      text.setAttribute("role", "group");
      text.setAttribute("aria-label", "What was read; choose a word to see what reads it");
      area.append(text);
      this.buttons = written(text, view.memory.tokens, pick);
    },
    draw(view, weights, focus) {
      this.buttons.forEach((button, s) => {
        const most = weights && focus.token !== null ? largest(weights) : 1;
        button.style.setProperty("--share", weights ? (0.75 * weights[s]) / most : 0);
        button.classList.toggle("chosen", focus.place === s);
      });
    },
    thumb: (view, pen, weights, w, h) => cells(pen, weights, 1, weights.length, w, h),
    name: (view, s) => `“${view.memory.tokens[s][0]}”`,
  },

  picture: {
    show(view, area, pick) {
      const [rows, columns] = view.memory.grid;
      const inside = (share, count) => Math.min(count - 1, Math.max(0, Math.floor(share * count)));
      const placeOf = (x, y) => inside(y, rows) * columns + inside(x, columns);
      this.canvas = pictured(area, view.memory.image, "The picture that is read", placeOf, pick);
    },
    draw(view, weights, focus) {
      const [rows, columns] = view.memory.grid, [pen, w, h] = brush(this.canvas);
      const outline = (s, style, size) => {
        const [x, y, wide, high] = cell(s, rows, columns, w, h);
        pen.strokeStyle = style, pen.lineWidth = size;
        pen.strokeRect(x + 1, y + 1, wide - 2, high - 2);
      };
      if (weights && focus.token !== null) {
        const most = largest(weights);
        weights.forEach((share, s) => {
          pen.fillStyle = `rgb(10 12 16 / ${(0.72 * (1 - share / most)).toFixed(3)})`;
          pen.fillRect(...cell(s, rows, columns, w, h));
        });
        weights.forEach((share, s) => share > 0.5 * most && outline(s, glow(share / most), 2));
      }
      if (focus.place !== null) outline(focus.place, colour("focus"), 3);
    },
    thumb: (view, pen, weights, w, h) => {
      const [rows, columns] = view.memory.grid, size = Math.min(w / columns, h / rows);
      pen.translate((w - size * columns) / 2, (h - size * rows) / 2);
      cells(pen, weights, rows, columns, size * columns, size * rows);
    },
    name: (view, s) =>
      `patch (${Math.floor(s / view.memory.grid[1]) + 1}, ${(s % view.memory.grid[1]) + 1})`,
  },

  sound: {
    show(view, area, pick) {
      const placeOf = (x) => Math.min(view.S - 1, Math.max(0, Math.floor(x * view.S)));
      this.canvas = pictured(area, view.memory.image, "The spectrogram of the sound", placeOf, pick);
      const clock = element("div", { className: "clock" });
      for (let i = 0; i <= 6; i++) clock.append(element("span", { textContent: `${((view.memory.seconds * i) / 6).toFixed(1)} s` }));
      area.append(clock);
      this.audio = null;
      if (!view.memory.audio) return;
      if (this.address) URL.revokeObjectURL(this.address);
      this.address = wavOf(view.memory.audio);
      this.audio = element("audio", { controls: true, src: this.address });
      this.audio.ontimeupdate = () => {
        const now = this.audio.paused ? -1 : this.audio.currentTime;
        view.memory.times?.forEach(([start, end], t) => page.buttons[t].classList.toggle("playing", start <= now && now < end));
      };
      this.audio.onpause = this.audio.ontimeupdate;
      area.append(this.audio);
    },
    play(view, t) {
      if (!this.audio) return;
      const row = view.row(null, null, t), peak = row.indexOf(Math.max(...row));
      this.audio.currentTime = view.memory.times ? view.memory.times[t][0] : (peak / view.S) * view.memory.seconds;
      this.audio.play().catch(() => {}); // a browser may refuse sound before the first click
    },
    draw(view, weights, focus) {
      const [pen, w, h] = brush(this.canvas), step = w / view.S;
      if (weights && focus.token !== null) {
        const most = largest(weights);
        pen.fillStyle = "rgb(10 12 16 / .55)";
        pen.fillRect(0, 0, w, h);
        weights.forEach((share, s) => {
          pen.fillStyle = glow((0.5 * share) / most);
          pen.fillRect(...cell(s, 1, view.S, w, h));
        });
        memories.sound.curve(pen, weights, w, h * 0.9, h, glow);
      }
      const time = focus.token !== null && view.memory.times?.[focus.token];
      if (time) {
        pen.strokeStyle = "#fff", pen.lineWidth = 2;
        const scale = w / view.memory.seconds;
        pen.strokeRect(time[0] * scale, 1, Math.max(2, (time[1] - time[0]) * scale), h - 2);
      }
      if (focus.place !== null) {
        pen.fillStyle = colour("focus");
        pen.fillRect(focus.place * step, 0, Math.max(2, step), h);
      }
    },
    curve(pen, weights, w, tall, bottom, shade = heat) {
      const most = largest(weights), step = w / weights.length;
      pen.beginPath(), pen.moveTo(0, bottom);
      weights.forEach((share, s) => pen.lineTo((s + 0.5) * step, bottom - (tall * share) / most));
      pen.lineTo(w, bottom);
      pen.fillStyle = shade(0.35), pen.fill();
      pen.strokeStyle = shade(1), pen.lineWidth = 1.2, pen.stroke();
    },
    thumb: (view, pen, weights, w, h) => memories.sound.curve(pen, weights, w, h - 2, h),
    name: (view, s) => `${(((s + 0.5) * view.memory.seconds) / view.S).toFixed(2)} s`,
    // Neighbours in time read alike, so the peak and the half second around it say more than single places.
    reading(view, weights) {
      const peak = weights.indexOf(Math.max(...weights)), near = (0.25 * view.S) / view.memory.seconds;
      const inside = weights.filter((_, s) => Math.abs(s - peak) <= near).reduce((a, b) => a + b, 0);
      return ["most at ", element("b", { textContent: this.name(view, peak) }), `, ${inside.toFixed(2)} within 0.25 s of it`];
    },
  },

  page: {
    show(view, area, pick) {
      const placeOf = (x, y) => {
        const found = view.memory.boxes.findLastIndex(([l, t, r, b]) => l <= x && x <= r && t <= y && y <= b);
        return found < 0 ? null : found;
      };
      this.canvas = pictured(area, view.memory.image, "The page and its regions", placeOf, (place, pinned) =>
        place === null || pinned ? pick(place, pinned) : page.look({ token: place, place: null }));
    },
    draw(view, weights, focus) {
      const [pen, w, h] = brush(this.canvas), most = weights ? largest(weights) : 1;
      view.memory.boxes.forEach(([l, t, r, b], s) => {
        const box = [l * w, t * h, (r - l) * w, (b - t) * h];
        if (weights && (focus.token !== null || focus.place !== null)) {
          pen.fillStyle = heat((0.7 * weights[s]) / most);
          pen.fillRect(...box);
        }
        const reads = focus.token === s || focus.place === s;
        pen.strokeStyle = reads ? colour("focus") : heat(0.45), pen.lineWidth = reads ? 3 : 1;
        pen.strokeRect(...box);
      });
    },
    thumb(view, pen, weights, w, h) {
      const most = largest(weights), size = Math.min(w / view.memory.size[0], h / view.memory.size[1]);
      const wide = size * view.memory.size[0], high = size * view.memory.size[1], left = (w - wide) / 2;
      pen.strokeStyle = colour("line");
      pen.strokeRect(left, 0.5, wide, high - 1);
      view.memory.boxes.forEach(([l, t, r, b], s) => {
        pen.fillStyle = heat(0.08 + (0.92 * weights[s]) / most);
        pen.fillRect(left + l * wide, t * high, (r - l) * wide, Math.max(1, (b - t) * high));
      });
    },
    name: (view, s) => `region ${view.tokens[s][0]}`,
  },
};
