// Numbers and times as people read them.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

export const count = (value) => (value >= 100000 ? short.format(value) : whole.format(value));

export function rate(value) {
  return value >= 100 ? count(Math.round(value)) : value >= 10 ? value.toFixed(0) : value.toFixed(value ? 1 : 0);
}

export function bytes(value) {
  if (!value) return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${value < 10 && unit > 1 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export const percent = (share) => `${Math.round(share * 100)} %`;

// "41 s", "3:07", "2 h 05", "4 d 3 h": never longer than eight characters.
export function duration(seconds) {
  seconds = Math.max(0, seconds);
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes}:${String(Math.floor(seconds % 60)).padStart(2, "0")}`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${String(minutes % 60).padStart(2, "0")}`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function took(seconds) {
  if (!seconds) return "–";
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
  return seconds < 10 ? `${seconds.toFixed(1)} s` : duration(seconds);
}

const pad = (value) => String(value).padStart(2, "0");

export function clock(at) {
  const date = new Date(at * 1000);
  return `${pad(date.getHours())}:${pad(date.getMinutes())}:${pad(date.getSeconds())}`;
}

export function moment(at) {
  const date = new Date(at * 1000);
  return `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())} ${clock(at)}`;
}
