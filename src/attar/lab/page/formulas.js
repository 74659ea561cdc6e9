// Formulas, as in lab/formulas.py and under the same names: tests hold both to 1e-9. Change both or neither.
const F = (() => {
  const sum = values => values.reduce((a, b) => a + b, 0),
    top = values => values.reduce((a, b) => Math.max(a, b));
  const least = values => values.reduce((a, b) => Math.min(a, b));
  const weight_bytes = (weights, bits, group, side) => (weights * (bits + (group ? side / group : 0))) / 8;
  const kv_token_bytes = (layers, heads, dim, bits, side) => (2 * layers * heads * (dim * bits + side)) / 8;
  const cache_blocks = (memory, taken, block) => Math.max(0, Math.floor((memory - taken) / block));
  const users_that_fit = (blocks, headroom, context, block) => {
    const each = Math.ceil(context / block),
      beside = Math.floor((blocks - Math.ceil(headroom * blocks)) / each);
    return Math.max(beside, Math.min(1, Math.floor(blocks / each)));
  };
  const read_seconds = (weights, sequences, kv, context, bandwidth) => (weights + sequences * context * kv) / bandwidth;
  const product_seconds = (rows, weights, rate) => (2 * rows * weights) / rate;
  const attention_seconds = (rows, context, width, rate) => (4 * rows * width * context) / rate;
  const step_seconds = (read, compute, overhead) => read + compute + overhead;
  const bound_seconds = (read, compute) => Math.max(read, compute);
  const ridge_rows = (rate, bits, bandwidth) => (rate * bits) / (16 * bandwidth);
  const intensity = (rows, weights, bits, context, kv, width) =>
    (2 * rows * weights + 4 * rows * width * context) / ((weights * bits) / 8 + rows * context * kv);
  const intensity_limit = (weights, context, kv, width) => (2 * weights + 4 * width * context) / (context * kv);
  const interpolated = (at, xs, ys) => {
    if (!xs.length) throw new Error("there are no points to interpolate between");
    if (xs.length === 1) return ys[0];
    let right = 1;
    while (right < xs.length - 1 && xs[right] < at) right++;
    return ys[right - 1] + ((ys[right] - ys[right - 1]) / (xs[right] - xs[right - 1])) * (at - xs[right - 1]);
  };
  const rounded = value => {
    const low = Math.floor(value),
      rest = value - low;
    return rest < 0.5 || (rest === 0.5 && low % 2 === 0) ? low : low + 1;
  };
  const grid = (values, bits) => {
    const low = Math.min(0, least(values)),
      scale = (Math.max(0, top(values)) - low) / (2 ** bits - 1);
    return scale ? [scale, rounded(-low / scale)] : [1, 0];
  };
  const codes = (values, bits) => {
    const [scale, zero] = grid(values, bits);
    return values.map(value => Math.min(Math.max(rounded(value / scale) + zero, 0), 2 ** bits - 1));
  };
  const stored = (values, bits) => {
    const [scale, zero] = grid(values, bits);
    return codes(values, bits).map(code => scale * (code - zero));
  };
  const symmetric = (values, bits) => {
    const scale = top(values.map(Math.abs)) / (2 ** (bits - 1) - 1);
    return values.map(value => (scale ? scale * rounded(value / scale) : 0));
  };
  const awq_error = (weights, inputs, alpha, bits) => {
    const scales = inputs.map(x => x ** alpha),
      back = stored(
        weights.map((w, i) => w * scales[i]),
        bits
      );
    return sum(back.map((b, i) => ((b / scales[i] - weights[i]) * inputs[i]) ** 2));
  };
  const smoothing = (inputs, weights, alpha) =>
    inputs.map((x, i) => (x > 0 && weights[i] > 0 ? x ** alpha / weights[i] ** (1 - alpha) : 1));
  const difficulty = maxima => {
    const median = [...maxima].sort((a, b) => a - b)[(maxima.length - 1) >> 1];
    return median ? top(maxima) / median : 0;
  };
  const smoothed_error = (rows, weights, scales, bits, weight_bits) => {
    const x = rows.map(row =>
      symmetric(
        row.map((value, i) => value / scales[i]),
        bits
      )
    );
    const w = weights.map(row =>
      symmetric(
        row.map((value, i) => value * scales[i]),
        weight_bits
      )
    );
    const dot = (a, b) => {
      let s = 0;
      for (let i = 0; i < a.length; i++) s += a[i] * b[i];
      return s;
    };
    let error = 0,
      total = 0;
    rows.forEach((row, n) =>
      weights.forEach((weight, o) => {
        const exact = dot(row, weight);
        error += (dot(x[n], w[o]) - exact) ** 2;
        total += exact ** 2;
      })
    );
    return total ? error / total : 0;
  };
  const contiguous_waste = (used, longest) => 1 - used / longest;
  const buddy_waste = used => 1 - used / 2 ** Math.ceil(Math.log2(used));
  const paged_waste = (used, block) => {
    const taken = Math.ceil(used / block) * block;
    return (taken - used) / taken;
  };
  const mean_tail = block => (block - 1) / 2;
  const shared_blocks = (prefix, sequences, block) => (sequences - 1) * Math.floor(prefix / block);
  const acceptance = (rate, drafts) => Array(drafts).fill(rate);
  const emitted_tokens = accepted => {
    let total = 1,
      reach = 1;
    for (const each of accepted) total += reach *= each;
    return total;
  };
  const chain = accepted => {
    let reach = 1;
    const found = accepted.map(each => {
      const ends = reach * (1 - each);
      reach *= each;
      return ends;
    });
    return [...found, reach];
  };
  const speculation_gain = (emitted, target, draft, verify, drafts) => (emitted * target) / (drafts * draft + verify);
  const static_utilisation = (batch, lengths) => {
    if (lengths === "uniform") return (batch + 1) / (2 * batch);
    if (lengths !== "exponential") throw new Error("lengths are uniform or exponential");
    return 1 / sum(Array.from({ length: batch }, (_, i) => 1 / (i + 1)));
  };
  const quantile_lengths = (count, mean, lengths, most) =>
    Array.from({ length: count }, (_, i) => {
      const u = (i * 0.618034 + 0.31) % 1;
      const value = lengths === "fixed" ? mean : lengths === "uniform" ? 2 * mean * u : -Math.log(1 - u) * mean;
      return Math.max(1, Math.min(most, rounded(value)));
    });
  const quantile_arrivals = (count, gap) => {
    let at = 0;
    return Array.from({ length: count }, (_, i) => {
      if (i) at -= Math.log(1 - ((i * 0.754878 + 0.17) % 1)) * gap;
      return at;
    });
  };
  const running = (rate, seconds) => rate * seconds;
  const percentile = (values, fraction) => {
    const ordered = [...values].sort((a, b) => a - b),
      at = fraction * (ordered.length - 1),
      low = Math.floor(at);
    return ordered[low] + (at - low) * (ordered[Math.min(low + 1, ordered.length - 1)] - ordered[low]);
  };
  const starts = (arrivals, lengths, slots, policy, delay) => {
    if (!["none", "static", "dynamic", "continuous"].includes(policy)) throw new Error("unknown policy");
    const size = policy === "none" ? 1 : slots,
      found = [];
    let free = Array(size).fill(0);
    while (found.length < arrivals.length) {
      const at = found.length;
      if (policy === "none" || policy === "continuous") {
        free.sort((a, b) => a - b);
        found.push(Math.max(arrivals[at], free[0]));
        free[0] = found[at] + lengths[at];
        continue;
      }
      let now = Math.max(arrivals[at], top(free)),
        end = at;
      if (policy === "dynamic") {
        const full = at + size <= arrivals.length ? arrivals[at + size - 1] : Infinity;
        now = Math.max(now, Math.min(full, arrivals[at] + delay));
      }
      while (end < Math.min(at + size, arrivals.length) && arrivals[end] <= now) end++;
      for (let each = at; each < end; each++) found.push(now);
      free = [now + top(lengths.slice(at, end))];
    }
    return found;
  };
  const online_softmax = (scores, tile) => {
    const found = [];
    let most = -Infinity,
      total = 0;
    for (let at = 0; at < scores.length; at += tile) {
      const part = scores.slice(at, at + tile),
        next = Math.max(most, top(part)),
        factor = Math.exp(most - next);
      total = total * factor + sum(part.map(each => Math.exp(each - next)));
      most = next;
      found.push([most, total, factor]);
    }
    return found;
  };
  return {
    weight_bytes,
    kv_token_bytes,
    cache_blocks,
    users_that_fit,
    read_seconds,
    product_seconds,
    attention_seconds,
    step_seconds,
    bound_seconds,
    ridge_rows,
    intensity,
    intensity_limit,
    interpolated,
    rounded,
    grid,
    codes,
    stored,
    symmetric,
    awq_error,
    smoothing,
    difficulty,
    smoothed_error,
    contiguous_waste,
    buddy_waste,
    paged_waste,
    mean_tail,
    shared_blocks,
    acceptance,
    emitted_tokens,
    chain,
    speculation_gain,
    static_utilisation,
    quantile_lengths,
    quantile_arrivals,
    running,
    percentile,
    starts,
    online_softmax
  };
})();
