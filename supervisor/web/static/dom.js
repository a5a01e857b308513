// Elements are created once and changed only where they differ: nothing flickers, focus stays.

export const $ = (id) => document.getElementById(id);

export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child != null));
  return node;
}

export function say(node, text) {
  text = String(text);
  if (node.textContent !== text) node.textContent = text;
}

export function mark(node, name) {
  if (node.className !== name) node.className = name;
}

// Updates the children of a container to match the [key, item] pairs, in order.
export function reconcile(container, pairs, make, update) {
  const known = container.known ?? (container.known = new Map());
  const wanted = new Set();
  let next = container.firstElementChild;
  for (const [key, item] of pairs) {
    wanted.add(key);
    let node = known.get(key);
    if (!node) {
      node = make(item, key);
      node.dataset.key = key;
      known.set(key, node);
    }
    update(node, item, key);
    if (node === next) next = next.nextElementSibling;
    else container.insertBefore(node, next);
  }
  for (const [key, node] of known) {
    if (!wanted.has(key)) {
      const neighbour = node.nextElementSibling ?? node.previousElementSibling;
      const focused = node === document.activeElement;
      node.remove();
      known.delete(key);
      if (focused) neighbour?.focus();
    }
  }
  if (container.roving) container.roving();
}

// Makes a container one tab stop: arrow keys move within, Enter and Space open.
export function rove(container, open) {
  const items = () => [...container.children].filter((child) => !child.hidden);
  const hold = (node) => {
    for (const child of container.children) if (child.tabIndex === 0 && child !== node) child.tabIndex = -1;
    if (node && node.tabIndex !== 0) node.tabIndex = 0;
  };
  container.roving = () => {
    const current = [...container.children].find((child) => child.tabIndex === 0 && !child.hidden);
    hold(current ?? items()[0]);
  };
  container.addEventListener("focusin", (event) => {
    const node = event.target.closest("[data-key]");
    if (node?.parentNode === container) hold(node);
  });
  container.addEventListener("click", (event) => {
    const node = event.target.closest("[data-key]");
    if (node && !event.target.closest("button")) { hold(node); open(node.dataset.key); }
  });
  container.addEventListener("keydown", (event) => {
    const all = items();
    const here = all.indexOf(event.target);
    if (here < 0) return;
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); open(event.target.dataset.key); return; }
    const across = all.filter((node) => node.offsetTop === all[0].offsetTop).length || 1;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across, Home: -here, End: all.length - 1 - here }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const to = all[Math.min(all.length - 1, Math.max(0, here + step))];
    hold(to);
    to.focus();
  });
}

let hiding = 0;
export function toast(text, wrong = false) {
  const node = $("toast");
  say(node, text);
  node.className = wrong ? "shown wrong" : "shown";
  clearTimeout(hiding);
  hiding = setTimeout(() => { node.className = ""; }, 6000);
}

for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", (event) => {
    const outside = event.target === dialog && !dialog.querySelector("form"); // what was typed stays
    if (outside || event.target.closest("[data-close]")) dialog.close();
  });
}
