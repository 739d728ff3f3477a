// Two texts, line by line.

/** [["=" | "-" | "+", line]]: the longest common subsequence stays. */
export function diff(before, after) {
  const one = before.split("\n"), other = after.split("\n");
  const lengths = Array.from({ length: one.length + 1 }, () => new Uint16Array(other.length + 1));
  for (let i = one.length - 1; i >= 0; i--)
    for (let j = other.length - 1; j >= 0; j--)
      lengths[i][j] = one[i] === other[j] ? lengths[i + 1][j + 1] + 1 : Math.max(lengths[i + 1][j], lengths[i][j + 1]);
  const lines = [];
  let i = 0, j = 0;
  while (i < one.length || j < other.length) {
    if (i < one.length && j < other.length && one[i] === other[j]) lines.push(["=", one[i++]]), j++;
    else if (j >= other.length || (i < one.length && lengths[i + 1][j] >= lengths[i][j + 1])) lines.push(["-", one[i++]]);
    else lines.push(["+", other[j++]]);
  }
  return lines;
}

/** Without what is far from any change. */
export function excerpt(lines, around = 2) {
  const near = lines.map((_, index) => lines.slice(Math.max(0, index - around), index + around + 1).some(([sign]) => sign !== "="));
  return lines.filter((_, index) => near[index]);
}
