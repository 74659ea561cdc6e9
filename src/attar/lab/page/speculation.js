// Speculative decoding. T(rows) is what a step of so many rows costs, over a step of one row.
const rowCost = (data, how, ridge) => {
  const points = how === "measured" ? rowPoints(data) : [];
  if (points.length) {
    const xs = points.map(p => p[0]),
      ys = points.map(p => p[1]);
    return rows => F.interpolated(rows, xs, ys);
  }
  if (how === "ridge") return rows => F.step_seconds(1, rows / ridge, 0) / F.step_seconds(1, 1 / ridge, 0);
  return () => 1;
};
// Measured seconds by rows, each row count once: of this machine's profile, or the medians of the server's last steps.
const rowPoints = data => {
  if (data.machine && data.machine.rows && data.machine.rows.length > 1) return data.machine.rows;
  const by = new Map();
  for (const step of data.steps || []) by.set(step.rows, [...(by.get(step.rows) || []), step.seconds]);
  const found = [...by].sort((a, b) => a[0] - b[0]).map(([rows, seconds]) => [rows, F.percentile(seconds, 0.5)]);
  return found.length > 1 ? found : [];
};
const measuredAcceptance = data => {
  const stats = data.engine && data.engine.stats;
  if (!stats || !stats.drafted_by_position) return [];
  return stats.drafted_by_position
    .map((drafted, i) => (drafted ? stats.accepted_by_position[i] / drafted : null))
    .filter(each => each !== null);
};

labs.push({
  id: "speculation",
  name: "Speculation",
  title: "Speculative decoding",
  lead: "A draft proposes K tokens, and one pass of the target checks them all. It pays where checking K + 1 rows costs little more than one.",
  controls(data) {
    const { outputs } = facts(data),
      ears = outputs.filter(each => each.ear !== null),
      own = measuredAcceptance(data);
    return [
      { id: "K", label: "Drafts a pass, K", min: 0, max: 16, whole: true, start: 5 },
      {
        id: "from",
        label: "Acceptance from",
        start: own.length ? "server" : "p",
        options: [
          ["p", "the slider p"],
          ...(own.length ? [["server", "this server, by position"]] : []),
          ...ears.map(each => [each.label, `EAR of ${each.label}: ${percent(each.ear)}`])
        ]
      },
      { id: "p", label: "Acceptance of a draft, p", min: 0, max: 1, step: 0.01, start: 0.8 },
      { id: "c", label: "Cost of a draft, in target steps", min: 0, max: 1, step: 0.01, start: 0.1 },
      { id: "B", label: "Sequences together", min: 1, max: 128, log: true, whole: true, start: 1 },
      {
        id: "rows",
        label: "Cost of rows",
        start: rowPoints(data).length ? "measured" : "ridge",
        options: [
          ...(rowPoints(data).length ? [["measured", "measured T(rows)"]] : []),
          ["ridge", "reading plus computing"],
          ["flat", "flat: as published formulas"]
        ]
      },
      {
        id: "ridge",
        label: "Rows where computing equals reading",
        unit: "rows",
        min: 1,
        max: 512,
        log: true,
        start: 38
      },
      { id: "draft", label: "Weights of the draft", unit: "of the target's", min: 0, max: 1, step: 0.01, start: 0.1 }
    ];
  },
  draw(v, data) {
    const { m, outputs } = facts(data),
      own = measuredAcceptance(data),
      output = outputs.find(each => each.label === v.from);
    const p = output ? output.ear : v.p;
    const accepted = K => (v.from === "server" ? range(K, i => own[Math.min(i, own.length - 1)]) : F.acceptance(p, K));
    const T = rowCost(data, v.rows, v.ridge),
      one = T(v.B);
    const gain = (K, cost = T) =>
      K ? F.speculation_gain(F.emitted_tokens(accepted(K)), cost(v.B), v.c * cost(v.B), cost(v.B * (K + 1)), K) : 1;
    const all = range(17),
      best = all.reduce((a, b) => (gain(b) > gain(a) ? b : a), 0),
      E = F.emitted_tokens(accepted(v.K)),
      leaves = F.chain(accepted(v.K));
    const summary =
      `K = ${v.K} emits ${num(E)} tokens a pass and runs ${num(gain(v.K))} times as fast; ` +
      (best ? `K = ${best} is best, ${num(gain(best))} times.` : "no drafts at all is best.");
    const target = m.bytes
      ? m.bytes.linears + m.bytes.head + m.bytes.embedding + m.bytes.norms
      : F.weight_bytes(m.linears + m.head, 16, 0, 0);
    const p0 = accepted(Math.max(1, v.K))[0];
    const words = range(v.K, i => i),
      cycle = [
        () => h("p", {}, `The draft proposes ${v.K} tokens, one after another: ${num(v.K * v.c)} target steps.`),
        () =>
          h(
            "p",
            {},
            `The target computes ${v.B} × ${v.K + 1} rows in one pass: ${num(T(v.B * (v.K + 1)) / one)} times the time of its usual step.`
          ),
        ...words.map(
          i => () =>
            h(
              "p",
              {},
              `Draft ${i + 1} is right with ${percent(accepted(v.K)[i])}; all ${i + 1} are right with ${percent(
                accepted(v.K)
                  .slice(0, i + 1)
                  .reduce((a, b) => a * b, 1)
              )}. A wrong one is replaced by a token of the target, and the rest is dropped.`
            )
        ),
        () =>
          h(
            "p",
            {},
            `If all ${v.K} are right, the same pass gives one more token of the target. On average the pass emits ${num(E, 4)} tokens: ${num(E - 1, 4)} accepted drafts and one of the target.`
          )
      ];
    return {
      summary,
      figures: [
        chart({
          title: "Speedup over K",
          summary,
          x: { label: "drafts a pass, K", min: 0, max: 16 },
          y: { label: "speedup", min: 0 },
          rules: [
            { x: best, label: `best K = ${best}` },
            { y: 1, label: "without" }
          ],
          series: [
            { name: v.rows === "flat" ? "flat cost" : "with the cost of rows", points: all.map(K => [K, gain(K)]) },
            { name: "flat cost of rows", points: all.map(K => [K, gain(K, () => 1)]) },
            { name: "chosen", dots: true, points: [[v.K, gain(v.K)]] },
            { name: "measured by this server", dots: true, points: [] }
          ]
        }),
        chart({
          title: "Tokens of a pass over K",
          summary,
          x: { label: "drafts a pass, K", min: 0, max: 16 },
          y: { label: "tokens", min: 0 },
          series: [
            { name: "expected", points: all.map(K => [K, F.emitted_tokens(accepted(K))]) },
            {
              name: "measured by this server",
              dots: true,
              points: own.length ? [[own.length, F.emitted_tokens(own)]] : []
            }
          ]
        }),
        stacked({
          title: "Drafts accepted in a pass",
          summary,
          show: percent,
          parts: leaves.map((value, i) => ({ name: i === v.K ? `all ${i}` : `exactly ${i}`, value }))
        }),
        stepper("One cycle", cycle)
      ],
      formulas: [
        [
          "Emitted tokens of a pass",
          v.from === "server"
            ? `E = 1 + Σ Π a = ${num(E, 5)}`
            : p0 === 1
              ? `E = K + 1 = ${v.K + 1}`
              : `E = (1 − p^(K+1)) / (1 − p) = (1 − ${num(p)}^${v.K + 1}) / (1 − ${num(p)}) = ${num(E, 5)}`
        ],
        ["Accepted drafts", `E − 1 = ${num(E - 1, 5)}`],
        ["Leaves of the chain", leaves.map((each, i) => `${i}: ${num(each, 4)}`).join(", ")],
        [
          "Speedup",
          `E T(B) / (K c T(B) + T(B (K + 1))) = ${num(E, 4)} × ${num(one)} / (${v.K} × ${v.c} × ${num(one)} + ${num(T(v.B * (v.K + 1)))}) = ${num(gain(v.K), 4)}`
        ],
        [
          "Weights of the draft",
          `${num(v.draft)} × ${bytes(target)} = ${bytes(v.draft * target)}, and its own KV cache`
        ]
      ],
      sources: [
        ...missing(data),
        v.from === "server"
          ? [
              "measured here",
              `Acceptance by position of ${num(data.engine.stats.drafted_tokens)} drafts: ${own.map(each => percent(each)).join(", ")}`
            ]
          : output
            ? ["receipt", `EAR of ${output.label} = E Σ min(p, q) on held-out text, which is not the draft's own path`]
            : ["what-if", "Acceptance: the slider. Real acceptance falls with the position."],
        v.rows === "measured"
          ? [
              "measured here",
              `T(rows): ${rowPoints(data)
                .map(p => `${p[0]}: ${time(p[1])}`)
                .join(", ")}`
            ]
          : [
              "what-if",
              v.rows === "flat"
                ? "Published formulas let K + 1 rows cost one row's time."
                : `T(rows) = reading + rows × reading / ${num(v.ridge)}`
            ],
        ["what-if", "Cost of a draft: the slider"],
        ["source", "Leviathan et al. 2023, arXiv:2211.17192"]
      ],
      omits: [
        "Trees of drafts.",
        "Attention over long contexts, which makes verification dearer.",
        "Drafts that a grammar forces."
      ]
    };
  }
});
