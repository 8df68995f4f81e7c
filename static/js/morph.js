// Updates a part of the page to a newer version and touches only what differs: focus, scroll position, selection, open
// <details> and charts stay. Children are matched by id or data-key, those without one by position.

const keyOf = (node) => (node.nodeType === Node.ELEMENT_NODE ? node.id || node.dataset.key || "" : "");

/** Attributes that belong to the browser: widths of meters (style), <details> that the user opened. */
const ours = (element, name) => name === "style" || (name === "open" && element.tagName === "DETAILS");

/** `old` is in the page; `fresh` is not, and its nodes may be moved into it. The inside of [data-kept] is left alone. */
export function morph(old, fresh) {
  const focused = document.activeElement;
  become(old, fresh);
  // An element that is moved in the page loses its focus.
  if (focused !== document.activeElement && focused?.isConnected) focused.focus({ preventScroll: true });
}

function become(old, fresh) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  if (old.isEqualNode(fresh)) return;
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && !ours(old, name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) {
    if (!ours(old, name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  if (!("kept" in old.dataset)) children(old, fresh);
}

function children(old, fresh) {
  const wantedKeys = new Set([...fresh.children].map(keyOf));
  for (const child of [...old.children]) if (keyOf(child) && !wantedKeys.has(keyOf(child))) child.remove();
  const known = new Map([...old.children].filter(keyOf).map((child) => [keyOf(child), child]));
  let here = old.firstChild;
  const drop = () => {
    const next = here.nextSibling;
    here.remove();
    here = next;
  };
  for (const wanted of [...fresh.childNodes]) {
    const key = keyOf(wanted);
    const match = key ? known.get(key) : alike(here, wanted) ? here : null;
    if (key && match) while (here && here !== match && !keyOf(here)) drop(); // rather than move the match, which may have the focus
    if (match && match === here) here = here.nextSibling;
    else old.insertBefore(match ?? wanted, here);
    if (match) become(match, wanted);
  }
  while (here) drop();
}

const alike = (here, wanted) => Boolean(here) && !keyOf(here) && here.nodeName === wanted.nodeName;
