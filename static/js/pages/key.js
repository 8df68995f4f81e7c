// A new API key or token: the copy button needs the clipboard API, which browsers offer on HTTPS and localhost only.

const secret = document.querySelector("[data-secret]");
const button = document.querySelector("[data-copy]");
const said = document.querySelector("[data-copied]");

button.hidden = !navigator.clipboard;
button.addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(secret.textContent);
    said.textContent = "Copied.";
  } catch {
    said.textContent = "Could not copy. Select the text and copy it manually.";
    getSelection().selectAllChildren(secret);
  }
});
