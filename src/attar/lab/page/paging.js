labs.push({
  id: "paging",
  name: "Paging",
  title: "Paged against contiguous KV memory",
  lead: "A request that reserves its longest possible answer keeps memory that it may never use. Blocks are taken as tokens come, and equal prefixes share them.",
  controls(data) {
    const { m } = facts(data),
      own = data.sequences && data.sequences.length;
    return [
      {
        id: "whose",
        label: "Requests",
        start: own ? "own" : "made",
        options: [...(own ? [["own", "mine on this server"]] : []), ["made", "what-if: as below"]]
      },
      {
        id: "max",
        label: "Longest request",
        unit: "tokens",
        min: 64,
        max: 131072,
        log: true,
        power: true,
        whole: true,
        start: 2048
      },
      { id: "mean", label: "Mean length", unit: "tokens", min: 1, max: 32768, log: true, whole: true, start: 400 },
      {
        id: "dist",
        label: "Lengths",
        start: "exponential",
        options: [
          ["exponential", "exponential"],
          ["uniform", "uniform"],
          ["fixed", "all equal"]
        ]
      },
      {
        id: "block",
        label: "Block",
        unit: "tokens",
        min: 1,
        max: 256,
        log: true,
        power: true,
        whole: true,
        start: m.block
      },
      { id: "requests", label: "Requests at once", min: 1, max: 32, whole: true, start: 8 },
      { id: "prefix", label: "Shared prefix", unit: "tokens", min: 0, max: 4096, whole: true, start: 0 }
    ];
  },
  draw(v, data) {
    const { m } = facts(data),
      own = data.sequences || [],
      mine = v.whose === "own" && own.length;
    const used = mine
        ? own.map(each => Math.max(1, each.tokens))
        : F.quantile_lengths(v.requests, v.mean, v.dist, v.max),
      final = mine ? own.map(each => Math.max(each.tokens, each.max_tokens)) : used.map(() => v.max);
    const count = used.length,
      all = used.reduce((a, b) => a + b, 0),
      names = used.map((_, i) => (mine ? own[i].id.slice(0, 8) : `request ${i + 1}`));
    const prefix = Math.min(v.prefix, ...used),
      saved = F.shared_blocks(prefix, count, v.block);
    const blocks = used.map(n => Math.ceil(n / v.block)),
      taken = blocks.reduce((a, b) => a + b, 0) * v.block,
      buddy = used.reduce((a, n) => a + n / (1 - F.buddy_waste(n)), 0);
    const reserved = final.reduce((a, b) => a + b, 0),
      held = taken - saved * v.block,
      waste = F.contiguous_waste(all, reserved),
      tail = (taken - all) / taken;
    const sizes = powers(9),
      wasteOf = b => {
        const t = used.reduce((a, n) => a + Math.ceil(n / b) * b, 0);
        return (t - all) / t;
      };
    const summary = `Contiguous memory wastes ${percent(waste)}, blocks of ${v.block} waste ${percent(tail)}: the same memory holds ${num(reserved / held)} times as many such requests.`;
    const states =
      data.engine && data.engine.stats && data.engine.stats.blocks
        ? [...atob(data.engine.stats.blocks)].map(each => each.charCodeAt(0))
        : [];
    const totals = [0, 1, 2].map(state => states.filter(each => each === state).length);
    const table = (rows, text) => () => [
      h("p", {}, text),
      h(
        "div",
        { class: "scroll" },
        tableOf({ head: ["logical block", "A: physical", "B: physical", "references"], rows })
      )
    ];
    const b = v.block;
    return {
      summary,
      figures: [
        spans({
          title: mine ? "My requests: tokens in blocks" : "Requests: tokens in blocks",
          summary,
          axis: "tokens",
          kinds: ["used", "tail of the last block", "reserved by contiguous memory"],
          open: "reserved by contiguous memory",
          end: Math.max(...final, ...blocks.map(x => x * b)),
          rows: used.map((n, i) => ({
            name: names[i],
            spans: [
              { from: 0, to: n, kind: "used", label: `${n} tokens used` },
              {
                from: n,
                to: blocks[i] * b,
                kind: "tail of the last block",
                label: `${blocks[i] * b - n} tokens of tail`
              },
              {
                from: blocks[i] * b,
                to: Math.max(final[i], blocks[i] * b),
                kind: "reserved by contiguous memory",
                label: `${Math.max(0, final[i] - blocks[i] * b)} tokens reserved`
              }
            ]
          }))
        }),
        chart({
          title: "Tokens of memory by allocator",
          summary,
          x: { label: "requests" },
          y: { label: "tokens", min: 0 },
          series: [
            ["contiguous, longest reserved", i => final.slice(0, i).reduce((a, x) => a + x, 0)],
            ["powers of two", i => used.slice(0, i).reduce((a, n) => a + n / (1 - F.buddy_waste(n)), 0)],
            ["blocks", i => blocks.slice(0, i).reduce((a, x) => a + x * b, 0)],
            [
              "blocks, prefix shared",
              i => (i ? blocks.slice(0, i).reduce((a, x) => a + x * b, 0) - F.shared_blocks(prefix, i, b) * b : 0)
            ]
          ].map(([name, of]) => ({ name, points: range(count + 1, i => [i, of(i)]) }))
        }),
        chart({
          title: "Waste over the size of a block",
          summary,
          x: { label: "tokens of a block", log: true },
          y: { label: "unused, %", min: 0 },
          series: [
            { name: "these requests", points: sizes.map(size => [size, 100 * wasteOf(size)]) },
            {
              name: "by the mean tail (b − 1) / 2",
              points: sizes.map(size => [size, (100 * F.mean_tail(size)) / (all / count + F.mean_tail(size))])
            },
            { name: `attar's blocks of ${m.block}`, dots: true, points: [[m.block, 100 * wasteOf(m.block)]] }
          ]
        }),
        ...(states.length
          ? [
              stacked({
                title: "This server's blocks now",
                show: num,
                parts: [
                  { name: "active", value: totals[1] },
                  { name: "cached", value: totals[2] },
                  { name: "free", value: totals[0], open: true }
                ]
              })
            ]
          : []),
        stepper("A block table, step by step", [
          table(
            [
              ["0", "7", "", "1"],
              ["1", "2", "", "1"]
            ],
            `A's prompt of ${b + Math.ceil(b / 2)} tokens takes two blocks, wherever they are free: 7 and 2. The second is partly empty.`
          ),
          table(
            [
              ["0", "7", "7", "2"],
              ["1", "2", "", "1"]
            ],
            `B has the same first ${b} tokens. It refers to block 7, which now has two references.`
          ),
          table(
            [
              ["0", "7", "7", "2"],
              ["1", "2", "5", "1 and 1"]
            ],
            "B's prompt goes on inside A's second block. The part that is equal is copied to block 5, because B will write there: copy on write."
          ),
          table(
            [
              ["0", "7", "7", "2"],
              ["1", "2", "5", "1 and 1"],
              ["2", "4", "", "1"]
            ],
            "A writes on. When block 2 is full, it takes block 4. Nothing is moved."
          ),
          table(
            [
              ["0", "", "7", "1"],
              ["1", "", "5", "1"]
            ],
            "A ends. Its blocks 2 and 4 have no reference left: they stay cached until others need the room. Block 7 is still B's."
          )
        ])
      ],
      formulas: [
        ["Contiguous waste", `1 − used / reserved = 1 − ${num(all)} / ${num(reserved)} = ${percent(waste, 4)}`],
        [
          "Waste of blocks",
          `(⌈n / b⌉ b − n) in sum / taken = (${num(taken)} − ${num(all)}) / ${num(taken)} = ${percent(tail, 4)}`
        ],
        [
          "Example: 100 tokens",
          `contiguous of 2,048: ${percent(F.contiguous_waste(100, 2048))}; blocks of 16: ${percent(F.paged_waste(100, 16))}; of ${m.block}: ${percent(F.paged_waste(100, m.block))}`
        ],
        ["Powers of two", `${num(buddy)} tokens, ${percent(1 - all / buddy)} unused`],
        ["Shared prefix", `(R − 1) ⌊p / b⌋ = ${count - 1} × ⌊${num(prefix)} / ${b}⌋ = ${num(saved)} blocks saved`],
        [
          "Capacity",
          `reserved / held = ${num(reserved)} / ${num(held)} = ${num(reserved / held, 4)} times the requests`
        ],
        [
          "Bytes of a block",
          `${b} × ${num(kvOf(data, m.kv).token)} B = ${bytes(b * kvOf(data, m.kv).token)} in all ${m.layers} layers`
        ]
      ],
      sources: [
        ...missing(data),
        mine
          ? ["measured here", `${count} requests of this key; those of other keys are not shown`]
          : ["what-if", "Lengths: fixed quantiles of the chosen distribution"],
        [
          states.length ? "measured here" : "not measured",
          states.length
            ? `Blocks: ${totals[1]} active, ${totals[2]} cached, ${totals[0]} free`
            : data.live
              ? "Blocks of this server: it has run nothing yet"
              : "Blocks of a server: open /lab on one"
        ],
        ["source", "Kwon et al. 2023, arXiv:2309.06180"]
      ],
      omits: [
        "Attention's kernels, for which 64 tokens a block were chosen.",
        "attar shares prefixes to the token, by copying a partial block: the count of whole blocks is a lower bound.",
        "The blocks that an admission keeps free."
      ]
    };
  }
});
