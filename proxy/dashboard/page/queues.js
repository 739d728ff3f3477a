// Who waits in kvlane for room on a pod: by pool, priority and tenant.

import { $, h, hint, replace, table } from "./dom.js";
import { bytes, count, percent, seconds } from "./format.js";
import { state } from "./state.js";

export function queues() {
  const pools = state.queues;
  if (pools === null) return replace($("queue-list"), hint("With several workers each has its own queue; ", h("code", {}, "kvlane_queue_requests"), " of /metrics has them."));
  if (!pools.length) return replace($("queue-list"), hint("No request waits: ", h("code", {}, "flowControl"), " has no limits, so requests go to pods at once."));
  return replace($("queue-list"), ...pools.map((pool) => ofPool(pool, pools.length > 1)));
}

function ofPool({ pool, saturation, bands }, named) {
  const full = saturation && [`pods are ${percent(saturation)} full`, h("meter", { min: 0, max: 1, high: 0.9, value: Math.min(1, saturation), "aria-label": `saturation of pool ${pool}` })];
  const rows = bands.flatMap((band) => [
    { properties: { class: "band" }, cells: [band.name === String(band.priority) ? `priority ${band.priority}` : `${band.name} (${band.priority})`, count(band.waiting), band.waiting ? seconds(Math.max(...band.tenants.map((one) => one.oldest))) : "–", band.waiting ? bytes(band.bytes) : "–"] },
    ...band.tenants.map((tenant) => ({ properties: { class: "tenant" }, cells: [tenant.name || "no tenant", count(tenant.waiting), seconds(tenant.oldest), ""] })),
  ]);
  return h("div", {}, named || full ? h("p", {}, named ? `${pool}: ` : "", full || "") : null, table({ caption: `Requests that wait for pool ${pool}`, columns: ["Priority, tenant", "Waiting", "Oldest", "Bodies"], rows, numbers: [1, 2, 3] }));
}
