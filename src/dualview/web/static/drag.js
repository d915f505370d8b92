// Reordering a list by dragging a grip, with mouse, pen or finger. Buttons do the same for the keyboard (editor.js).

export function draggable(list, moved) {
  list.addEventListener("pointerdown", (down) => {
    const grip = down.target.closest(".grip");
    if (!grip || down.button !== 0) return;
    down.preventDefault();
    const item = grip.closest("li");
    const from = [...list.children].indexOf(item);
    grip.setPointerCapture(down.pointerId);
    item.classList.add("dragged");

    // The others are moved around the dragged one: an element that is itself moved loses the pointer.
    function place(event) {
      let other;
      while ((other = item.previousElementSibling) && event.clientY < middle(other)) item.after(other);
      while ((other = item.nextElementSibling) && event.clientY > middle(other)) item.before(other);
    }

    function end(event) {
      grip.removeEventListener("pointermove", place);
      grip.removeEventListener("pointerup", end);
      grip.removeEventListener("pointercancel", end);
      item.classList.remove("dragged");
      const to = [...list.children].indexOf(item);
      if (event.type === "pointerup" && to !== from) moved(from, to);
      else if (to !== from) list.insertBefore(item, list.children[to < from ? from + 1 : from]);
    }

    grip.addEventListener("pointermove", place);
    grip.addEventListener("pointerup", end);
    grip.addEventListener("pointercancel", end);
  });
}

function middle(element) {
  const { top, height } = element.getBoundingClientRect();
  return top + height / 2;
}
