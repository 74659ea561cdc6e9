// What a page looks like, for test_browser.py: sizes, names, and contrasts after WCAG 2.2 AA.
(() => {
  const parse = text => (text.match(/[\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) =>
    [r, g, b]
      .map(v => v / 255)
      .map(v => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
      .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const behind = node => {
    for (; node; node = node.parentElement) {
      const c = parse(getComputedStyle(node).backgroundColor);
      if (c.length === 3 || c[3] > 0) return c;
    }
    return [255, 255, 255];
  };
  const texts = [...document.querySelectorAll("body *")].filter(
    each =>
      each.getClientRects().length &&
      !each.closest("script, style, option") &&
      [...each.childNodes].some(child => child.nodeType === 3 && child.data.trim())
  );
  const pale = texts
    .filter(each => {
      const style = getComputedStyle(each),
        colour = each instanceof SVGElement ? style.fill : style.color;
      return contrast(parse(colour), behind(each)) < 4.5;
    })
    .map(each => `${each.tagName} ${each.textContent.slice(0, 30)}`);
  const marks = [...document.querySelectorAll("svg .mark, svg .line, svg .area:not(.open)")].filter(
    each => each.getClientRects().length
  );
  const faint = marks
    .filter(each => {
      const style = getComputedStyle(each),
        colour = each.matches(".line, .hollow") ? style.stroke : style.fill;
      return contrast(parse(colour), behind(each)) < 3;
    })
    .map(each => each.getAttribute("class"));
  const inputs = [...document.querySelectorAll("main input, main select")];
  const pen = document.createElement("canvas").getContext("2d");
  const cut = [...document.querySelectorAll("main select:not([hidden])")].filter(each => {
    pen.font = getComputedStyle(each).font;
    return pen.measureText(each.selectedOptions[0].text).width + 36 > each.clientWidth; // padding and arrow
  });
  const axes = [...document.querySelectorAll("main svg:has(.axis)")];
  const ids = [...document.querySelectorAll("[id]")].map(each => each.id);
  return {
    wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    pale,
    faint,
    marks: marks.length,
    nameless: inputs
      .filter(each => !each.labels.length && !each.getAttribute("aria-label"))
      .map(each => each.id),
    unlabelled: [...document.querySelectorAll("main svg:not([aria-hidden])")].filter(
      each => each.getAttribute("role") !== "img" || !each.getAttribute("aria-label")
    ).length,
    tables: document.querySelectorAll("#figures table").length,
    twice: ids.filter((each, i) => ids.indexOf(each) !== i),
    cut: cut.map(each => each.id),
    bare: axes.filter(each => each.querySelectorAll(".tick[text-anchor=end]").length < 2).length, // an axis without a scale
    covered: document.querySelectorAll("main svg .label ~ :is(.line, .mark)").length,
    small: [...document.querySelectorAll("button, select, main input")].filter(
      each => each.getClientRects().length && each.getBoundingClientRect().height < 16
    ).length,
    formulas: [...document.querySelectorAll("#formulas dd")].map(each => each.textContent),
    sources: document.querySelectorAll("#sources .badge").length,
    omits: document.querySelectorAll("#omits li").length
  };
})();
