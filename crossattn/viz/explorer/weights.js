// The data of the page, and the weights in it: 8 bits each, times one scale a row.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const bytes = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0));

function opened(view) {
  const [L, N, T, S] = view.shape;
  const levels = bytes(view.weights);
  const scale = new Float32Array(bytes(view.scale).buffer);
  const chosen = (index, count) => (index === null ? [...Array(count).keys()] : [index]);

  // One row of a layer and head, S numbers; null means all of them.
  function row(layer, head, t) {
    const sum = new Float32Array(S);
    const layers = chosen(layer, L), heads = chosen(head, N);
    for (const l of layers) {
      for (const n of heads) {
        const place = (l * N + n) * T + t, step = scale[place] / 255 / layers.length / heads.length;
        for (let s = 0; s < S; s++) sum[s] += levels[place * S + s] * step;
      }
    }
    return sum;
  }

  // How much each of the T rows reads of place s.
  function column(layer, head, s) {
    const sum = new Float32Array(T), layers = chosen(layer, L), heads = chosen(head, N);
    for (const l of layers) {
      for (const n of heads) {
        for (let t = 0; t < T; t++) {
          const place = (l * N + n) * T + t;
          sum[t] += (levels[place * S + s] * scale[place]) / 255 / layers.length / heads.length;
        }
      }
    }
    return sum;
  }

  return { ...view, L, N, T, S, row, column };
}

// Mu-law, the coding of telephones, as a WAV file of 16 bits.
function wavOf({ rate, samples }) {
  const coded = bytes(samples), wav = new DataView(new ArrayBuffer(44 + 2 * coded.length));
  const text = (place, word) => [...word].forEach((char, i) => wav.setUint8(place + i, char.charCodeAt(0)));
  text(0, "RIFF"), text(8, "WAVEfmt "), text(36, "data");
  wav.setUint32(4, 36 + 2 * coded.length, true), wav.setUint32(16, 16, true);
  wav.setUint16(20, 1, true), wav.setUint16(22, 1, true);
  wav.setUint32(24, rate, true), wav.setUint32(28, 2 * rate, true);
  wav.setUint16(32, 2, true), wav.setUint16(34, 16, true);
  wav.setUint32(40, 2 * coded.length, true);
  coded.forEach((code, i) => {
    const x = code / 127.5 - 1, loud = (256 ** Math.abs(x) - 1) / 255;
    wav.setInt16(44 + 2 * i, Math.sign(x) * loud * 32767, true);
  });
  return URL.createObjectURL(new Blob([wav], { type: "audio/wav" }));
}
