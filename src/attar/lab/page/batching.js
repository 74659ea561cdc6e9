const policies = ["none", "static", "dynamic", "continuous"];
const policyOptions = policies.map(each => [each, each]);
// The same trace each time: arrivals a mean gap apart, and lengths of the distribution.
const traceOf = v => ({
  arrivals: F.quantile_arrivals(v.requests, v.gap),
  lengths: F.quantile_lengths(v.requests, v.length, v.dist, Infinity)
});
const traceControls = [
  { id: "policy", label: "Policy", start: "continuous", options: policyOptions },
  { id: "slots", label: "Slots", min: 1, max: 32, whole: true, start: 4 },
  { id: "requests", label: "Requests", min: 1, max: 64, whole: true, start: 16 },
  { id: "gap", label: "Mean gap between arrivals", unit: "steps", min: 0, max: 100, step: 1, start: 5 },
  { id: "length", label: "Mean answer", unit: "tokens", min: 1, max: 500, whole: true, start: 40 },
  {
    id: "dist",
    label: "Answers",
    start: "exponential",
    options: [
      ["exponential", "exponential"],
      ["uniform", "uniform"],
      ["fixed", "all equal"]
    ]
  },
  { id: "delay", label: "Longest wait of dynamic", unit: "steps", min: 0, max: 200, step: 1, start: 20 }
];
const outcome = (trace, v, policy) => {
  const began = F.starts(trace.arrivals, trace.lengths, v.slots, policy, v.delay),
    ends = began.map((each, i) => each + trace.lengths[i]);
  const end = Math.max(...ends),
    work = trace.lengths.reduce((a, b) => a + b, 0);
  return {
    began,
    ends,
    end,
    busy: work / (end * (policy === "none" ? 1 : v.slots)),
    rate: work / end,
    waits: began.map((each, i) => each - trace.arrivals[i])
  };
};

labs.push({
  id: "batching",
  name: "Batching",
  title: "No, static, dynamic and continuous batching",
  lead: "A static batch holds its slots until its longest answer ends. Continuous batching gives a slot away as soon as it is free.",
  controls: () => traceControls,
  draw(v) {
    const trace = traceOf(v),
      all = policies.map(policy => outcome(trace, v, policy)),
      one = all[policies.indexOf(v.policy)],
      slots = v.policy === "none" ? 1 : v.slots;
    const free = Array(slots).fill(0),
      rows = range(slots, i => ({ name: `slot ${i + 1}`, spans: [] }));
    one.began.forEach((from, i) => {
      let slot = free.findIndex(each => each <= from + 1e-9);
      if (slot < 0) slot = free.indexOf(Math.min(...free));
      rows[slot].spans.push({
        from,
        to: one.ends[i],
        kind: i % 2 ? "even request" : "odd request",
        label: `request ${i + 1}: arrives ${num(trace.arrivals[i])}, starts ${num(from)}, ends ${num(one.ends[i])}`
      });
      free[slot] = one.ends[i];
    });
    const summary = `${v.policy}: ${num(one.rate)} tokens a step, slots ${percent(one.busy)} busy, half of the requests wait at most ${num(F.percentile(one.waits, 0.5))} steps.`;
    return {
      summary,
      figures: [
        spans({
          title: `Slots over time, ${v.policy}`,
          summary,
          rows,
          kinds: ["odd request", "even request"],
          end: Math.max(...all.slice(1).map(each => each.end), one.end),
          axis: "steps"
        }),
        listing(
          "The four policies on the same trace",
          ["policy", "steps in all", "tokens a step", "slots busy", "wait p50", "wait p95"],
          policies.map((policy, i) => [
            policy,
            num(all[i].end),
            num(all[i].rate),
            percent(all[i].busy),
            num(F.percentile(all[i].waits, 0.5)),
            num(F.percentile(all[i].waits, 0.95))
          ])
        ),
        chart({
          title: "Busy part of a static batch's slots",
          summary,
          x: { label: "slots", log: true },
          y: { label: "busy, %", min: 0, max: 100 },
          series: ["uniform", "exponential"]
            .map(name => ({
              name: name + " answers",
              points: powers(7).map(b => [b, 100 * F.static_utilisation(b, name)])
            }))
            .concat({ name: "this trace, static", dots: true, points: [[v.slots, 100 * all[1].busy]] })
        })
      ],
      formulas: [
        [
          "Busy slots",
          `tokens / (slots × steps) = ${num(trace.lengths.reduce((a, b) => a + b, 0))} / (${slots} × ${num(one.end)}) = ${percent(one.busy, 4)}`
        ],
        [
          "Static, uniform answers",
          `(B + 1) / 2 B = ${num(F.static_utilisation(v.slots, "uniform"), 4)}: continuous gains up to ${num(1 / F.static_utilisation(v.slots, "uniform"))} times`
        ],
        [
          "Static, exponential answers",
          `1 / H_B = ${num(F.static_utilisation(v.slots, "exponential"), 4)}: up to ${num(1 / F.static_utilisation(v.slots, "exponential"))} times`
        ]
      ],
      sources: [
        ["what-if", "Arrivals and lengths: fixed quantiles of the chosen distributions"],
        ["source", "Yu et al. 2022, Orca (OSDI)"]
      ],
      omits: [
        "A step's time: here it does not grow with its rows.",
        "Prompts, which take steps of their own.",
        "Memory: no request waits for blocks, and none is preempted."
      ]
    };
  }
});

labs.push({
  id: "deployment",
  name: "Deployment",
  title: "Deployment: KV precision, capacity and batching",
  lead: "The KV format decides how many requests fit, and the policy how well their slots are used.",
  controls(data) {
    const { m, machine } = facts(data);
    return [
      { id: "kv", label: "KV cache", start: m.kv, options: kvOptions(data) },
      { id: "device", label: "Device", start: "here", options: deviceOptions(data) },
      {
        id: "memory",
        label: "Memory",
        unit: "GB",
        min: 0.1,
        max: 512,
        log: true,
        start: machine && machine.memory ? Number((machine.memory / 1e9).toPrecision(3)) : 16
      },
      {
        id: "context",
        label: "Context of a request",
        unit: "tokens",
        min: 64,
        max: Math.max(m.context, 131072),
        log: true,
        whole: true,
        start: Math.min(m.context, 2048)
      },
      { id: "rate", label: "Arrivals", unit: "a second", min: 0.01, max: 100, log: true, start: 0.5 },
      ...traceControls
    ];
  },
  draw(v, data) {
    const { m, kv, width } = facts(data),
      device = deviceOf(data, v.device),
      format = kvOf(data, v.kv),
      memory = v.device === "here" ? v.memory * 1e9 : device.memory;
    const w = m.bytes || { linears: 2 * m.linears, head: 2 * m.head, embedding: 2 * m.embedding, norms: m.norms },
      weights = w.linears + w.head + w.embedding + w.norms;
    const blocksOf = k => F.cache_blocks(memory, weights + m.step + m.processes, k.token * m.block),
      fits = (k, n = v.context) => F.users_that_fit(blocksOf(k), m.headroom, n, m.block);
    const list = kv.length ? kv : [format],
      trace = traceOf(v),
      slots = Math.max(1, Math.min(v.slots, fits(format)));
    const seconds = B =>
      device.read && device.int8
        ? F.step_seconds(
            F.read_seconds(w.linears + w.head, B, format.token, v.context, device.read),
            F.product_seconds(B, m.active, device.int8) + F.attention_seconds(B, v.context, width, device.int8),
            0
          )
        : NaN;
    const all = policies.map(policy => outcome(trace, { ...v, slots }, policy)),
      one = all[policies.indexOf(v.policy)],
      step = seconds(one.rate); // a step has a row for each busy slot
    const residence = v.length * step,
      together = F.running(v.rate, residence),
      replay = (data.replay || []).filter(() => traceControls.slice(2).every(c => v[c.id] === c.start));
    const fill = range(61, i => {
      const at = (one.end * i) / 60;
      return [
        at,
        one.began.reduce(
          (sum, from, r) =>
            sum +
            (from <= at && at < one.ends[r]
              ? Math.ceil(
                  (v.context - v.length + at - from > 0 ? v.context - v.length + at - from : at - from) / m.block
                )
              : 0),
          0
        )
      ];
    });
    const summary = `${num(fits(format))} requests of ${num(v.context)} tokens fit with ${format.name}. ${Number.isFinite(step) ? `A mean step takes at least ${time(step)}; ${num(together)} run on average.` : "Step times are not measured."}`;
    return {
      summary,
      figures: [
        listing(
          "Capacity of each KV format",
          ["format", "bits", "bytes a token", "tokens held", "requests", "KL"],
          list.map(k => [
            k.name,
            num(k.bits),
            num(k.token),
            num(blocksOf(k) * m.block),
            num(fits(k)),
            k.kl === undefined || k.kl === null ? "not measured" : num(k.kl)
          ])
        ),
        chart({
          title: "Requests that fit over their context",
          summary,
          x: { label: "tokens of a request", log: true },
          y: { label: "requests", log: true },
          rules: [{ x: v.context, label: "chosen" }],
          series: list
            .slice(0, 5)
            .map(k => ({ name: k.name, points: powers(12, n => 64 * n).map(n => [n, fits(k, n)]) }))
        }),
        chart({
          title: "Blocks in use over time",
          summary,
          x: { label: "steps" },
          y: { label: "blocks", min: 0 },
          rules: [{ y: blocksOf(format) * (1 - m.headroom), label: "no admission above" }],
          series: [{ name: v.policy, points: fill }]
        }),
        chart({
          title: "Throughput over the number of slots",
          summary,
          x: { label: "slots", log: true },
          y: { label: "tokens/s", min: 0 },
          series: [
            {
              name: "busy slots / step time",
              points: powers(6).map(b => {
                const { rate } = outcome(trace, { ...v, slots: b }, v.policy);
                return [b, rate / seconds(rate)];
              })
            },
            {
              name: "attar's scheduler on this trace",
              dots: true,
              points: replay
                .filter(each => each.policy === v.policy)
                .map(each => [each.slots, each.rate / seconds(each.rate)])
            }
          ]
        }),
        ...(replay.length
          ? [
              listing(
                "attar's own scheduler on one trace",
                ["policy", "slots", "steps", "tokens a step", "wait p50", "wait p95", "preemptions"],
                replay.map(each => [
                  each.policy,
                  num(each.slots),
                  num(each.steps),
                  num(each.rate),
                  num(F.percentile(each.waits, 0.5)),
                  num(F.percentile(each.waits, 0.95)),
                  num(each.preemptions)
                ])
              )
            ]
          : [])
      ],
      formulas: [
        [
          "Blocks",
          `⌊(${bytes(memory)} − ${bytes(weights + m.step + m.processes)}) / ${bytes(format.token * m.block)}⌋ = ${num(blocksOf(format))}`
        ],
        [
          "Requests",
          `⌊(${num(blocksOf(format))} − ⌈${m.headroom} × ${num(blocksOf(format))}⌉) / ${Math.ceil(v.context / m.block)}⌋ = ${num(fits(format))}`
        ],
        ["Mean step", `reading plus computing of ${num(one.rate)} rows = ${time(step)}`],
        [
          "Running on average",
          `rate × residence = ${num(v.rate)} × ${time(residence)} = ${num(together)}` +
            (together > slots ? `: more than ${slots} slots, so the queue grows` : "")
        ],
        ["Throughput", `tokens a step / step = ${num(one.rate)} / ${time(step)} = ${num(one.rate / step)} tokens/s`],
        [
          "Wait for a slot",
          `p50 ${time(F.percentile(one.waits, 0.5) * step)}, p95 ${time(F.percentile(one.waits, 0.95) * step)}`
        ]
      ],
      sources: [
        ...missing(data),
        ["exact", "Capacity: attar plan's sums"],
        [device.badge, device.text],
        ["not measured", "KL of KV formats: `attar eval --kv FORMAT` measures it"],
        [
          replay.length ? "exact" : "not measured",
          replay.length
            ? "attar's scheduler, driven in integers by one trace; the points and the table are its own steps"
            : "A run of attar's scheduler: `attar lab` adds one"
        ],
        ["source", "Little 1961"]
      ],
      omits: [
        "Time of prompts in the timeline.",
        "Fitted efficiencies of the kernels: step times are limits.",
        "Speculation and sparsity."
      ]
    };
  }
});
