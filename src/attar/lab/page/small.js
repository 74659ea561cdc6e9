const listOf = (text, most) =>
  text
    .split(/[\s,;]+/)
    .filter(Boolean)
    .map(Number)
    .filter(Number.isFinite)
    .slice(0, most);

labs.push({
  id: "attention",
  name: "Attention",
  title: "FlashAttention's softmax, tile by tile",
  lead: "One row of scores is read in tiles. The running maximum m and sum l are corrected by exp(m before − m now), so no row is ever held whole.",
  controls: () => [
    ...[1, 2, 3, 0, -1, 2.5].map((start, i) => ({
      id: "s" + (i + 1),
      label: `Score ${i + 1}`,
      min: -20,
      max: 20,
      step: 0.1,
      start
    })),
    { id: "count", label: "Scores in use", min: 1, max: 6, whole: true, start: 3 },
    { id: "tile", label: "Tile", unit: "scores", min: 1, max: 6, whole: true, start: 1 }
  ],
  draw(v) {
    const scores = range(v.count, i => v["s" + (i + 1)]),
      steps = F.online_softmax(scores, v.tile),
      [m, l] = steps[steps.length - 1];
    const weights = scores.map(each => Math.exp(each - m) / l),
      summary = `The weights are ${weights.map(each => num(each, 4)).join(", ")}, with l = ${num(l, 5)}.`;
    return {
      summary,
      figures: [
        stepper(
          "Tiles",
          steps.map(([most, sum, factor], i) => () => [
            h(
              "p",
              {},
              `Tile ${i + 1}: scores ${scores
                .slice(i * v.tile, (i + 1) * v.tile)
                .map(each => num(each))
                .join(", ")}.`
            ),
            tableOf({ head: ["m", "exp(m before − m)", "l"], rows: [[num(most, 5), num(factor, 5), num(sum, 6)]] })
          ])
        ),
        chart({
          title: "Weights of the scores",
          summary,
          x: { label: "score number" },
          y: { label: "weight", min: 0, max: 1 },
          series: [{ name: "exp(s − m) / l", dots: true, points: weights.map((each, i) => [i + 1, each]) }]
        })
      ],
      formulas: [
        ["Maximum", `m = max of ${scores.map(each => num(each)).join(", ")} = ${num(m)}`],
        ["Sum", `l = Σ exp(s − m) = ${num(l, 5)}`],
        ["Weights", weights.map(each => num(each, 4)).join(", ")],
        [
          "Their sum",
          num(
            weights.reduce((a, b) => a + b, 0),
            6
          )
        ]
      ],
      sources: [
        ["what-if", "Scores: the controls"],
        ["source", "Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al. 2022, arXiv:2205.14135"]
      ],
      omits: [
        "The values: each tile's sum of weighted values is rescaled by the same factor.",
        "Masks and the scale of the scores."
      ]
    };
  }
});

labs.push({
  id: "rounding",
  name: "Rounding",
  title: "Rounding a tensor: RTN and AWQ",
  lead: "A group's grid must contain zero. AWQ scales up weights that meet large inputs before they are rounded, and divides them again after.",
  controls: () => [
    ...[2.3, 1.7, -0.4, 0.9, -1.2, 0.25].map((start, i) => ({
      id: "w" + (i + 1),
      label: `Weight ${i + 1}`,
      min: -5,
      max: 5,
      step: 0.05,
      start
    })),
    { id: "count", label: "Weights in use", min: 1, max: 6, whole: true, start: 6 },
    { id: "bits", label: "Bits", min: 2, max: 8, whole: true, start: 4 },
    { id: "salient", label: "Input of weight 6, others 1", min: 1, max: 100, log: true, start: 10 },
    { id: "alpha", label: "AWQ's exponent", min: 0, max: 1, step: 0.05, start: 0.5 }
  ],
  draw(v) {
    const w = range(v.count, i => v["w" + (i + 1)]),
      x = w.map((_, i) => (i === 5 ? v.salient : 1)),
      [scale, zero] = F.grid(w, v.bits),
      codes = F.codes(w, v.bits),
      back = F.stored(w, v.bits);
    const alphas = range(21, i => i / 20),
      errors = alphas.map(a => F.awq_error(w, x, a, v.bits)),
      plainly = errors[0],
      chosen = F.awq_error(w, x, v.alpha, v.bits),
      best = alphas[errors.indexOf(Math.min(...errors))];
    const summary = `Scale ${num(scale, 4)}, zero ${zero}. The output's squared error is ${num(plainly)} plainly and ${num(chosen)} with exponent ${num(v.alpha)}; ${num(best)} is best.`;
    return {
      summary,
      figures: [
        listing(
          "Weights and their codes",
          ["weight", "input", "code", "stored", "error"],
          w.map((each, i) => [num(each), num(x[i]), num(codes[i]), num(back[i], 4), num(back[i] - each)])
        ),
        chart({
          title: "Squared error of the output over AWQ's exponent",
          summary,
          x: { label: "exponent", min: 0, max: 1 },
          y: { label: "squared error", min: 0 },
          rules: [{ x: best, label: "best" }],
          series: [
            { name: "error", points: alphas.map((a, i) => [a, errors[i]]) },
            { name: "chosen", dots: true, points: [[v.alpha, chosen]] }
          ]
        })
      ],
      formulas: [
        [
          "Scale",
          `(max(0, high) − min(0, low)) / (2^b − 1) = ${num(scale * (2 ** v.bits - 1), 4)} / ${2 ** v.bits - 1} = ${num(scale, 4)}`
        ],
        ["Zero", `round(−low / scale) = ${zero}`],
        ["Codes", codes.join(", ")],
        [
          "Example",
          `2.3 and 1.7 alone in 4 bits: scale ${num(F.grid([2.3, 1.7], 4)[0], 4)}, codes ${F.codes([2.3, 1.7], 4).join(" and ")}`
        ]
      ],
      sources: [
        ["what-if", "Weights and inputs: the controls"],
        ["source", "Lin et al. 2023, arXiv:2306.00978"]
      ],
      omits: [
        "Error correction between weights (GPTQ).",
        "AWQ's normalization of its scales, which shifts none of the codes here by more than the common factor."
      ]
    };
  }
});
