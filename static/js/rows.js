// A table body that holds only the rows near the visible ones; two spacers keep the scroll bar correct for all rows. All
// rows must have the same height, which the stylesheet sets.

const SPARE = 1; // screens of rows kept above and below the visible ones
const LIMIT_MAX = 200; // as in console/live/queue_view.py

export class RowWindow {
  /** `make(row)` returns a new element, `update(element, row)` fills it, `ask(offset, limit)` requests another window. */
  constructor(scroller, body, columns, { make, update, ask }) {
    Object.assign(this, { scroller, body, make, update, ask });
    this.elements = new Map(); // id -> element
    this.height = 0;
    this.asked = { offset: 0, limit: 60 };
    this.above = spacer(columns);
    this.below = spacer(columns);
    body.replaceChildren(this.above, this.below);
    let drawn = false;
    scroller.addEventListener("scroll", () => {
      if (drawn) return;
      drawn = true;
      requestAnimationFrame(() => {
        drawn = false;
        this.look();
      });
    });
    new ResizeObserver(() => this.look()).observe(scroller);
  }

  /** Shows the rows from `offset` of `count`, each with an id. Elements of rows that stay are reused. */
  show(rows, offset, count) {
    const present = new Set(rows.map((row) => row.id));
    for (const [id, element] of this.elements) {
      if (present.has(id)) continue;
      if (element.contains(document.activeElement)) this.scroller.focus({ preventScroll: true });
      element.remove();
      this.elements.delete(id);
    }
    let after = this.above;
    rows.forEach((row, index) => {
      let element = this.elements.get(row.id);
      if (!element) {
        element = this.make(row);
        this.elements.set(row.id, element);
      }
      element.setAttribute("aria-rowindex", String(offset + index + 2));
      this.update(element, row);
      if (after.nextElementSibling !== element) after.after(element);
      after = element;
    });
    this.count = count;
    if (rows.length) this.height = after.getBoundingClientRect().height || this.height;
    tall(this.above, offset * this.height);
    tall(this.below, Math.max(0, count - offset - rows.length) * this.height);
    this.look();
  }

  /** Requests other rows if the current ones do not cover the visible part. */
  look() {
    if (!this.height || !this.count) return;
    const seen = Math.ceil(this.scroller.clientHeight / this.height) + 1;
    const first = Math.floor(this.scroller.scrollTop / this.height);
    const { offset, limit } = this.asked;
    const last = Math.min(this.count, first + seen);
    const covered = offset <= first && offset + limit >= last;
    const enough = limit >= Math.min(LIMIT_MAX, seen);
    if (covered && enough) return;
    const wanted = Math.min(LIMIT_MAX, seen * (1 + 2 * SPARE));
    this.want(Math.max(0, first - Math.floor((wanted - seen) / 2)), wanted);
  }

  want(offset, limit = this.asked.limit) {
    this.asked = { offset, limit };
    this.ask(offset, limit);
  }

  toTop() {
    this.scroller.scrollTop = 0;
    this.want(0);
  }
}

function spacer(columns) {
  const row = document.createElement("tr");
  row.className = "space";
  row.setAttribute("aria-hidden", "true");
  row.hidden = true;
  const cell = document.createElement("td");
  cell.colSpan = columns;
  row.append(cell);
  return row;
}

function tall(row, pixels) {
  row.hidden = pixels < 1;
  row.style.height = `${pixels}px`;
}
