// Dark or light, as the system says or as the reader chose. A script of its own before the page is drawn, so that a
// page that was chosen dark never flashes white.
(() => {
  const NAMES = { auto: "as the system has them", light: "light", dark: "dark" };
  const root = document.documentElement;
  let chosen = "auto";
  try {
    chosen = localStorage.getItem("ragkv-theme") ?? "auto";
  } catch {
    // storage may be forbidden: then it is chosen for this visit
  }

  function apply(theme) {
    chosen = theme in NAMES ? theme : "auto";
    if (chosen === "auto") delete root.dataset.theme;
    else root.dataset.theme = chosen;
  }

  function keep() {
    try {
      localStorage.setItem("ragkv-theme", chosen);
    } catch {
      // as above
    }
  }

  apply(chosen);
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const shown = document.getElementById("theme-name");
    const tell = () => {
      shown.textContent = chosen;
      button.setAttribute("aria-label", `Colours: ${NAMES[chosen]}`);
    };
    button.addEventListener("click", () => {
      const order = Object.keys(NAMES);
      apply(order[(order.indexOf(chosen) + 1) % order.length]);
      keep();
      tell();
    });
    tell();
  });
})();
