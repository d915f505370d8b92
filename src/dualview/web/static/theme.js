// Light, dark, or as the system has it.

const NEXT = { auto: "light", light: "dark", dark: "auto" };

export function theme(button) {
  let chosen = "auto";
  try {
    chosen = localStorage.getItem("dualview-theme") || "auto";
  } catch {
    // A browser that keeps nothing: the system's theme it is.
  }
  function show() {
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    button.textContent = `Theme: ${chosen}`;
  }
  button.addEventListener("click", () => {
    chosen = NEXT[chosen] || "auto";
    try {
      localStorage.setItem("dualview-theme", chosen);
    } catch {
      // Not kept, then.
    }
    show();
  });
  show();
}
