// Numbers for people.

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0 s";
  const size = Math.abs(value);
  if (size < 0.001) return `${digits(value * 1e6)} µs`;
  if (size < 1) return `${digits(value * 1000)} ms`;
  if (size < 120) return `${digits(value)} s`;
  if (size < 7200) return `${Math.round(value / 60)} min`;
  return `${digits(value / 3600)} h`;
}

export function count(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${digits(value / 1e9)} G`;
  if (size >= 1e6) return `${digits(value / 1e6)} M`;
  if (size >= 1e4) return `${digits(value / 1e3)} k`;
  return digits(value);
}

export const percent = (share) =>
  share === null || share === undefined ? "–" : `${digits(share * 100, share < 0.0995 ? 1 : 0)} %`;

export function bytes(value) {
  if (value < 1024) return `${value} B`;
  const power = Math.min(4, Math.floor(Math.log2(value) / 10));
  return `${digits(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

export const plural = (number, one, many = `${one}s`) => `${number} ${number === 1 ? one : many}`;

export const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });

export const moment = (at) => new Date(at * 1000).toLocaleString([], { hour12: false });

/** vllm-10 after vllm-9. */
export const natural = new Intl.Collator("en", { numeric: true }).compare;

function digits(value, decimals = null) {
  const size = Math.abs(value);
  const places = decimals ?? (size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : 2);
  return value.toFixed(places).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}
