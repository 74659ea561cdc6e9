labs.push({
  id: "roofline",
  name: "Latency",
  title: "Latency against bit width, and the roofline",
  lead: "A decode step reads every weight once and every sequence's cache. More sequences share the weights, but bring their own cache and their own arithmetic.",
  controls(data) {
    const { m, machine } = facts(data),
      share = i => (machine && machine.reached ? Math.max(1, Math.round(100 * machine.reached[i])) : 100),
      own = m.bytes ? Number(((8 * m.bytes.linears) / m.linears).toPrecision(3)) : 16;
    return [
      { id: "bits", label: "Bits of a weight, with scales", min: 2, max: 32, step: 0.125, start: own },
      { id: "kv", label: "KV cache", start: m.kv, options: kvOptions(data) },
      { id: "B", label: "Sequences in a step", min: 1, max: 1024, log: true, whole: true, start: 1 },
      {
        id: "context",
        label: "Context of a sequence",
        unit: "tokens",
        min: 1,
        max: Math.max(m.context, 131072),
        log: true,
        whole: true,
        start: Math.min(512, m.context)
      },
      {
        id: "phase",
        label: "Phase",
        start: "decode",
        options: [
          ["decode", "decode: a row a sequence"],
          ["prefill", "prefill: 512 rows of one"]
        ]
      },
      { id: "device", label: "Device", start: "here", options: deviceOptions(data) },
      {
        id: "products",
        label: "Products in",
        start: "int8",
        options: [
          ["int8", "int8"],
          ["bf16", "bf16"]
        ]
      },
      { id: "read", label: "Reached of the bandwidth", unit: "%", min: 1, max: 100, step: 1, start: share(0) },
      { id: "reach", label: "Reached of the arithmetic", unit: "%", min: 1, max: 100, step: 1, start: share(1) },
      {
        id: "t0",
        label: "Overhead of a step",
        unit: "ms",
        min: 0,
        max: 50,
        step: 0.05,
        start: machine ? 1e3 * (machine.overhead || 0) : 0
      }
    ];
  },
  draw(v, data) {
    const { m, width, outputs } = facts(data),
      kv = kvOf(data, v.kv),
      device = deviceOf(data, v.device);
    const known = Boolean(device.read && device[v.products]),
      sheet = facts(data).gpus[0];
    const use = known ? device : { read: NaN, int8: NaN, bf16: NaN };
    const BW = (use.read * v.read) / 100,
      R = (use[v.products] * v.reach) / 100,
      rest = m.bytes ? m.bytes.head + m.bytes.norms : 2 * m.head;
    const weightsOf = bits => F.weight_bytes(m.linears, bits, 0, 0) + rest,
      parts = (bits, rows, sequences) => ({
        weights: F.read_seconds(weightsOf(bits), 0, 0, 0, BW),
        cache: F.read_seconds(0, sequences, kv.token, v.context, BW),
        products: F.product_seconds(rows, m.active, R),
        attention: F.attention_seconds(rows, v.context, width, R)
      });
    const model = (bits, rows, sequences) => {
      const p = parts(bits, rows, sequences);
      return F.step_seconds(p.weights + p.cache, p.products + p.attention, v.t0 / 1e3);
    };
    const bound = (bits, rows, sequences) => {
      const p = parts(bits, rows, sequences);
      return F.bound_seconds(((p.weights + p.cache) * v.read) / 100, ((p.products + p.attention) * v.reach) / 100);
    };
    const decode = v.phase === "decode",
      rows = decode ? v.B : 512,
      sequences = decode ? v.B : 1,
      p = parts(v.bits, rows, sequences);
    const seconds = model(v.bits, rows, sequences),
      least = bound(v.bits, rows, sequences),
      ridge = F.ridge_rows(R, v.bits, BW);
    const batches = powers(11),
      points = v.device === "here" ? rowPoints(data) : [],
      speeds = outputs.filter(o => o.decode !== null);
    const limit = F.intensity_limit(m.active, v.context, kv.token, width),
      dense = F.intensity(rows, m.active, v.bits, v.context, kv.token, width);
    const summary = known
      ? `A step of ${rows} rows takes ${time(seconds)}, ${num(rows / seconds)} tokens a second; the roofline allows ${time(least)}.`
      : "The rates of this machine are not measured: choose a device with a data sheet.";
    return {
      summary,
      figures: [
        stacked({
          title: "Time of a step",
          show: time,
          summary,
          parts: known
            ? [
                { name: "read weights", value: p.weights },
                { name: "read KV cache", value: p.cache },
                { name: "products", value: p.products },
                { name: "attention", value: p.attention },
                { name: "overhead", value: v.t0 / 1e3 }
              ]
            : []
        }),
        chart({
          title: "Tokens a second of all sequences over their number",
          summary,
          x: { label: "rows of a decode step", log: true },
          y: { label: "tokens/s", log: true },
          rules: [{ x: ridge, label: `computing = reading: ${num(ridge)} rows` }],
          series: [
            { name: "limit: the longer of the two", points: batches.map(b => [b, b / bound(v.bits, b, b)]) },
            { name: "model: reading plus computing", points: batches.map(b => [b, b / model(v.bits, b, b)]) },
            { name: "measured here, by rows", dots: true, points: points.map(([b, t]) => [b, b / t]) }
          ]
        }),
        chart({
          title: "Time of a token over bits",
          summary,
          x: { label: "bits of a weight, with scales", min: 2, max: 16 },
          y: { label: "ms a token", min: 0 },
          series: [
            ...[1, 4, 16].map(b => ({
              name: `${b} sequence${b > 1 ? "s" : ""}`,
              points: range(29, i => 2 + i / 2).map(bits => [bits, 1e3 * model(bits, b, b)])
            })),
            {
              name: "measured outputs (attar bench)",
              dots: true,
              points: v.device === "here" ? speeds.map(o => [o.bits, 1e3 / o.decode, o.label]) : []
            }
          ]
        }),
        chart({
          title: "Roofline",
          summary,
          x: { label: "operations for each byte", log: true },
          y: { label: "operations/s", log: true },
          rules: [{ x: limit, label: `no batch exceeds ${num(limit)}` }],
          series: [
            {
              name: "roof",
              points: range(25, i => 2 ** (i / 2)).map(i => [i, Math.min(use[v.products], i * use.read)])
            },
            {
              name: "this step by the model",
              dots: true,
              points: [[dense, (2 * rows * m.active + 4 * rows * width * v.context) / seconds]]
            },
            {
              name: "measured here, by rows",
              dots: true,
              points: points.map(([b, t]) => [
                F.intensity(b, m.active, v.bits, v.context, kv.token, width),
                (2 * b * m.active + 4 * b * width * v.context) / t
              ])
            }
          ]
        })
      ],
      formulas: [
        ["Read weights", `bytes / bandwidth = ${bytes(weightsOf(v.bits))} / ${speed(BW)} = ${time(p.weights)}`],
        [
          "Read KV cache",
          `B N kv / bandwidth = ${sequences} × ${num(v.context)} × ${num(kv.token)} B / ${speed(BW)} = ${time(p.cache)}`
        ],
        ["Products", `2 rows P / R = 2 × ${num(rows)} × ${num(m.active)} / ${rate(R)} = ${time(p.products)}`],
        [
          "Attention",
          `4 rows H d L N / R = 4 × ${num(rows)} × ${num(width)} × ${num(v.context)} / ${rate(R)} = ${time(p.attention)}`
        ],
        [
          "Limit",
          `max(reading, computing) at full rates = ${time(least)}; the model's step is ${num(seconds / least)} times as long`
        ],
        [
          "Computing = reading",
          `R bits / (16 bandwidth) = ${rate(R)} × ${v.bits} / (16 × ${speed(BW)}) = ${num(ridge)} rows`
        ],
        [
          "Ceiling of operations a byte",
          `(2 P + 4 H d L N) / (N kv) = ${num(limit)}: with long contexts no batch makes decoding compute-bound`
        ]
      ],
      sources: [
        ...missing(data),
        [device.badge, device.text],
        [
          points.length ? "measured here" : "not measured",
          points.length
            ? "Seconds by rows: " + points.map(q => `${q[0]}: ${time(q[1])}`).join(", ")
            : "Seconds by rows of a step: nothing is drawn for them."
        ],
        [
          "what-if",
          data.machine && data.machine.reached && data.machine.reached[0] < 1
            ? "Reached fractions and overhead: they begin as fitted to measured products"
            : "Reached fractions and overhead: sliders, not fitted here"
        ],
        ...speeds.map(o => ["receipt", `${o.label}: ${num(o.decode)} tokens/s`]),
        ...(sheet ? [["source", "Williams et al. 2009; Pope et al. 2022, arXiv:2211.05102"]] : [])
      ],
      omits: [
        "Norms, activations, sampling and writes.",
        "Caches of the processor: each weight counts as read from memory once a step.",
        "Experts count by their mean share.",
        "Other load on the same memory."
      ]
    };
  }
});
