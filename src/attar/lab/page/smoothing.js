const floats = text => {
  const raw = atob(text),
    view = new DataView(Uint8Array.from(raw, each => each.charCodeAt(0)).buffer);
  return range(raw.length / 4, i => view.getFloat32(4 * i, true));
};
const rowsOf = (text, columns) => {
  const all = floats(text);
  return range(all.length / columns, i => all.slice(i * columns, (i + 1) * columns));
};
const unpacked = new Map();
// Real rows of inputs and weights of a group of linear layers, and each channel's maxima over all rows.
const groupOf = (data, id) => {
  const found = data.channels[id] || data.channels[0];
  if (!unpacked.has(found))
    unpacked.set(found, {
      ...found,
      x: rowsOf(found.rows, found.inputs.length),
      w: rowsOf(found.outs, found.inputs.length)
    });
  return unpacked.get(found);
};
const exampleGroup = {
  name: "an example of 64 channels",
  tokens: 0,
  of: 64,
  inputs: range(64, i => 0.5 + ((i * 0.618034) % 1) + (i === 9 ? 40 : i === 30 ? 15 : 0)),
  weights: range(64, i => 0.1 + 0.1 * ((i * 0.754878) % 1))
};
exampleGroup.x = range(12, t => exampleGroup.inputs.map((top, i) => top * Math.sin(1 + 12.9898 * (t + 1) * (i + 1))));
exampleGroup.w = range(12, o => exampleGroup.weights.map((top, i) => top * Math.sin(2 + 78.233 * (o + 1) * (i + 1))));

labs.push({
  id: "smoothing",
  name: "SmoothQuant",
  title: "SmoothQuant: who carries the difficulty",
  lead: "Inputs with a few large channels round badly. Each channel is divided by s, and the weights that read it are multiplied by s.",
  controls: data => [
    {
      id: "group",
      label: "Linear layers",
      start: "0",
      options: (data.channels || []).length
        ? data.channels.map((each, i) => [String(i), each.name])
        : [["0", "an example, not this model"]]
    },
    { id: "alpha", label: "Migration strength, alpha", min: 0, max: 1, step: 0.05, start: 0.5 },
    { id: "bits", label: "Bits of the inputs", min: 3, max: 8, whole: true, start: 8 },
    { id: "wbits", label: "Bits of the weights", min: 3, max: 8, whole: true, start: 8 },
    {
      id: "show",
      label: "Show",
      start: "smoothed",
      options: [
        ["smoothed", "smoothed"],
        ["original", "original"]
      ]
    },
    { id: "factor", label: "Inject outliers: factor", min: 1, max: 100, log: true, start: 1 },
    { id: "many", label: "Inject outliers: channels", min: 0, max: 8, whole: true, start: 2 }
  ],
  draw(v, data) {
    const real = (data.channels || []).length > 0,
      g = real ? groupOf(data, Number(v.group)) : exampleGroup,
      grow = i => (i < v.many ? v.factor : 1);
    const inputs = g.inputs.map((top, i) => top * grow(i)),
      x = g.x.map(row => row.map((value, i) => value * grow(i)));
    const errorAt = a => F.smoothed_error(x, g.w, F.smoothing(inputs, g.weights, a), v.bits, v.wbits),
      alphas = range(21, i => i / 20),
      errors = alphas.map(errorAt);
    const original = F.smoothed_error(
        x,
        g.w,
        inputs.map(() => 1),
        v.bits,
        v.wbits
      ),
      best = errors.indexOf(Math.min(...errors)),
      s = F.smoothing(inputs, g.weights, v.alpha),
      chosen = errorAt(v.alpha);
    const afterX = inputs.map((top, i) => top / s[i]),
      afterW = g.weights.map((top, i) => top * s[i]),
      shown = v.show === "smoothed";
    const order = range(inputs.length).sort((a, b) => inputs[b] - inputs[a]),
      worst = order.slice(0, 5),
      gain = original / errors[best];
    const summary = `Smoothing gains ${num(gain)}x here at alpha ${num(alphas[best])}: relative error ${num(original)} plainly, ${num(chosen)} at ${num(v.alpha)}. The largest channel is ${num(F.difficulty(inputs))} times the median.`;
    return {
      summary,
      figures: [
        chart({
          title: "Largest value of each channel, sorted",
          summary,
          x: { label: "channel, by its input" },
          y: { label: "maximum", log: true },
          series: [
            { name: "inputs |x|", points: order.map((c, i) => [i + 1, (shown ? afterX : inputs)[c]]) },
            { name: "weights |w|", points: order.map((c, i) => [i + 1, (shown ? afterW : g.weights)[c]]) }
          ]
        }),
        chart({
          title: "Error of the rounded product over alpha",
          summary,
          x: { label: "alpha", min: 0, max: 1 },
          y: { label: "relative squared error", log: true },
          rules: [
            { x: alphas[best], label: `best ${num(alphas[best])}` },
            { y: original, label: "without smoothing" }
          ],
          series: [
            { name: "smoothed, real rounding", points: alphas.map((a, i) => [a, errors[i]]) },
            { name: "chosen", dots: true, points: [[v.alpha, chosen]] },
            { name: "0.5", dots: true, points: [[0.5, errors[10]]] }
          ]
        }),
        listing(
          "The five largest channels",
          ["channel", "max |x|", "max |w|", "s", "|x| / s", "|w| s"],
          worst.map(c => [
            num(g.index ? g.index[c] : c),
            num(inputs[c]),
            num(g.weights[c]),
            num(s[c]),
            num(afterX[c]),
            num(afterW[c])
          ])
        )
      ],
      formulas: [
        [
          "Divisor of the largest channel",
          `|x|^a / |w|^(1 − a) = ${num(inputs[worst[0]])}^${num(v.alpha)} / ${num(g.weights[worst[0]])}^${num(1 - v.alpha)} = ${num(s[worst[0]], 4)}`
        ],
        [
          "At alpha 0.5",
          `both maxima become √(|x| |w|) = ${num(Math.sqrt(inputs[worst[0]] * g.weights[worst[0]]), 4)}`
        ],
        [
          "Difficulty of the inputs",
          `largest / median: ${num(F.difficulty(inputs))} before, ${num(F.difficulty(afterX))} after`
        ],
        ["Difficulty of the weights", `${num(F.difficulty(g.weights))} before, ${num(F.difficulty(afterW))} after`],
        ["Error", `Σ (x W − round(x / s) round(W s))² / Σ (x W)² = ${num(chosen, 4)}`]
      ],
      sources: [
        real
          ? [
              "measured here",
              `${g.name}: maxima over ${num(g.tokens)} tokens; error on ${g.x.length} real rows, ${g.w.length} outputs and ${inputs.length} of ${g.of} channels`
            ]
          : ["not measured", "This is a made example: `attar lab MODEL --text FILE` samples the model's own channels."],
        ...(v.factor > 1 ? [["what-if", `${v.many} channels are multiplied by ${num(v.factor)}`]] : []),
        ["source", "Xiao et al. 2022, arXiv:2211.10438"]
      ],
      omits: [
        "Static scales of activations: each row has its own.",
        "Channels beyond the sample.",
        "The norm or layer before, into which 1 / s is folded: exact for all but down projections."
      ]
    };
  }
});
