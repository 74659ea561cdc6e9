// Facts that several simulators start from. A missing figure is null, and the page says that it is not measured.
const labs = [];
const facts = data => {
  const m = data.model || {
    name: "no model",
    layers: 32,
    hidden: 4096,
    heads: 32,
    kv_heads: 8,
    head_dim: 128,
    context: 8192,
    linears: 6979321856,
    active: 6979321856,
    head: 525336576,
    embedding: 525336576,
    norms: 0,
    step: 0,
    processes: 0,
    block: 64,
    headroom: 0.02,
    kv: "bfloat16"
  };
  const width = m.layers * m.heads * m.head_dim;
  return {
    m,
    width,
    kv: m.kv_formats || [],
    storages: m.storages || [],
    outputs: data.outputs || [],
    gpus: data.gpus || [],
    machine: data.machine
  };
};
const missing = data =>
  data.model ? [] : [["what-if", "No model is loaded: sizes are those of Llama 3.1 8B's published shape."]];
const kvOptions = data => {
  const found = facts(data).kv.map(each => [each.name, `${each.name}, ${num(each.bits)} bits`]);
  return found.length ? found : [["bfloat16", "bfloat16, 16 bits"]];
};
const kvOf = (data, name) => {
  const { m, kv } = facts(data),
    found = kv.find(each => each.name === name);
  return found || { name, bits: 16, token: F.kv_token_bytes(m.layers, m.kv_heads, m.head_dim, 16, 0), kl: null };
};
const deviceOptions = data => [
  ["here", "this machine"],
  ...facts(data).gpus.map(each => [each.name, each.name + ", data sheet"])
];
const deviceOf = (data, name) => {
  const { gpus, machine } = facts(data),
    gpu = gpus.find(each => each.name === name);
  if (gpu)
    return {
      ...gpu,
      badge: "data sheet",
      text: `${gpu.name}: ${bytes(gpu.memory)}, ${speed(gpu.read)}, bf16 ${rate(gpu.bf16)}, int8 ${rate(gpu.int8)}, without sparsity`
    };
  if (!machine)
    return {
      name: "this machine",
      memory: null,
      read: null,
      bf16: null,
      int8: null,
      badge: "not measured",
      text: "The rates of this machine are not measured."
    };
  return { ...machine, badge: "measured here", text: machine.source };
};
const stored = each =>
  `${each.label}: ${bytes(each.bytes)} on disk` +
  (each.kl === null
    ? ""
    : `, KL ${num(each.kl)}` + (each.low === null ? "" : ` (${num(each.low)} to ${num(each.high)})`));

labs.push({
  id: "size",
  name: "Size",
  title: "Size, bits and what is left for the KV cache",
  lead: "Weights, the largest step and the processes take memory first. The rest is cut into blocks for keys and values.",
  controls(data) {
    const { m, storages } = facts(data),
      here = deviceOf(data, "here");
    return [
      {
        id: "as",
        label: "Weights",
        start: "own",
        options: [
          ["own", `as loaded: ${m.bytes ? m.bytes.name : "bf16"}`],
          ...storages.map(each => [each.name, each.name]),
          ["free", "what-if: bits below"]
        ]
      },
      { id: "bits", label: "Bits of a weight", unit: "what-if", min: 2, max: 16, step: 1, whole: true, start: 4 },
      {
        id: "group",
        label: "Group under one scale",
        unit: "weights",
        min: 0,
        max: 256,
        step: 16,
        whole: true,
        start: 128
      },
      {
        id: "side",
        label: "Scale and zero of a group",
        unit: "bits",
        min: 0,
        max: 64,
        step: 1,
        whole: true,
        start: 16
      },
      { id: "head", label: "Bits of head and embedding", unit: "what-if", min: 2, max: 32, whole: true, start: 16 },
      { id: "kv", label: "KV cache", start: m.kv, options: kvOptions(data) },
      {
        id: "context",
        label: "Context of a user",
        unit: "tokens",
        min: 64,
        max: Math.max(m.context, 131072),
        log: true,
        whole: true,
        start: Math.min(m.context, 4096)
      },
      { id: "users", label: "Users", min: 1, max: 1024, log: true, whole: true, start: 4 },
      { id: "device", label: "Memory of", start: "here", options: deviceOptions(data) },
      {
        id: "memory",
        label: "Memory",
        unit: "GB",
        min: 0.1,
        max: 512,
        log: true,
        start: here.memory ? Number((here.memory / 1e9).toPrecision(3)) : 16
      }
    ];
  },
  draw(v, data) {
    const { m, outputs, storages } = facts(data),
      kv = kvOf(data, v.kv),
      device = deviceOf(data, v.device);
    const memory = v.device === "here" ? v.memory * 1e9 : device.memory;
    const exact = v.as === "own" ? m.bytes : storages.find(each => each.name === v.as);
    const free = {
      linears: F.weight_bytes(m.linears, v.bits, v.group, v.side),
      head: F.weight_bytes(m.head, v.head, 0, 0),
      embedding: F.weight_bytes(m.embedding, v.head, 0, 0),
      norms: m.norms
    };
    const w = exact || free,
      taken = w.linears + w.head + w.embedding + w.norms + m.step + m.processes;
    const block = kv.token * m.block,
      blocks = F.cache_blocks(memory, taken, block),
      fit = F.users_that_fit(blocks, m.headroom, v.context, m.block);
    const used = Math.min(v.users, fit) * Math.ceil(v.context / m.block) * block,
      left = Math.max(0, memory - taken - used);
    const summary =
      taken > memory
        ? `The model alone needs ${bytes(taken)}, more than ${bytes(memory)}.`
        : `${fit} of ${v.users} users of ${num(v.context)} tokens fit in ${bytes(memory)}; the cache holds ${num(blocks * m.block)} tokens.`;
    const bits = range(15, i => i + 2),
      all = b => F.weight_bytes(m.linears, b, v.group, v.side) + w.head + w.embedding + w.norms;
    const lower = all(v.bits) - all(Math.max(2, v.bits - 1)),
      each = Math.ceil(v.context / m.block) * block;
    return {
      summary,
      figures: [
        stacked({
          title: "Memory by use",
          summary,
          limit: { value: memory, label: both(memory) },
          parts: [
            { name: "linear layers", value: w.linears },
            { name: "head and embedding", value: w.head + w.embedding },
            { name: "norms and biases", value: w.norms },
            { name: "largest step", value: m.step },
            { name: "processes", value: m.processes },
            { name: `KV cache of ${Math.min(v.users, fit)} users`, value: used },
            { name: "free", value: left, open: true }
          ]
        }),
        chart({
          title: "Bytes of the weights over bits a weight",
          summary,
          x: { label: "bits a weight (linear layers)", min: 2, max: 16 },
          y: { label: "GB", min: 0 },
          rules: memory < 10 * all(16) ? [{ y: memory / 1e9, label: "memory" }] : [], // else the curve lies on the axis
          series: [
            { name: "formula", points: bits.map(b => [b, all(b) / 1e9]) },
            {
              name: "stored outputs (receipts)",
              dots: true,
              points: outputs.filter(o => o.bits <= 16).map(o => [o.bits, o.bytes / 1e9, stored(o)])
            },
            {
              name: "as loaded here",
              dots: true,
              points: exact ? [[(8 * w.linears) / m.linears, (taken - m.step - m.processes) / 1e9, w.name]] : []
            }
          ]
        }),
        chart({
          title: "Users that fit over context",
          summary,
          x: { label: "tokens of a user", log: true },
          y: { label: "users", log: true },
          series: (m.kv_formats || [kv]).slice(0, 6).map(k => ({
            name: k.name,
            points: powers(14, n => 64 * n)
              .filter(n => n <= Math.max(m.context, v.context))
              .map(n => [n, F.users_that_fit(F.cache_blocks(memory, taken, k.token * m.block), m.headroom, n, m.block)])
          }))
        })
      ],
      formulas: [
        [
          "Linear layers",
          exact
            ? `${w.name}, as the kernels lay it out = ${bytes(w.linears, 6)}`
            : `n (b + side / group) / 8 = ${num(m.linears)} × (${v.bits} + ${v.group ? `${v.side} / ${v.group}` : 0}) / 8 = ${bytes(free.linears, 6)}`
        ],
        [
          "KV cache of a token",
          `2 L H (d b + scale) / 8, as ${kv.name} stores it = 2 × ${m.layers} × ${m.kv_heads} × ${m.head_dim} at ${num(kv.bits)} bits = ${num(kv.token)} B`
        ],
        ["Blocks", `⌊(${bytes(memory)} − ${bytes(taken)}) / (${m.block} × ${num(kv.token)} B)⌋ = ${num(blocks)}`],
        [
          "Users",
          `⌊(${num(blocks)} − ⌈${m.headroom} × ${num(blocks)}⌉) / ⌈${num(v.context)} / ${m.block}⌉⌋ = ${num(fit)}`
        ],
        ["One bit less", `frees ${bytes(lower)}, the cache of ${num(Math.floor(lower / each))} more users`]
      ],
      sources: [
        ...missing(data),
        [
          exact ? "exact" : "what-if",
          exact
            ? "Weights: sums over the model's tensors (attar plan)"
            : "Weights: the formula, without the layout's padding"
        ],
        ["exact", "KV cache, largest step and processes: attar plan"],
        v.device === "here"
          ? [
              data.machine ? "measured here" : "what-if",
              `Memory: ${data.machine ? data.machine.memory_source : "the slider"}`
            ]
          : [device.badge, device.text],
        ...outputs.map(o => ["receipt", stored(o)])
      ],
      omits: [
        "Adapters, and several processes or GPUs.",
        "Memory of a GPU's driver, libraries and graphs.",
        "Layers with a sliding window: they need fewer blocks than is counted here."
      ]
    };
  }
});
