// A new key: copied with one press where the browser allows it (a secure origin, or localhost).

const secret = document.querySelector("[data-secret]");
const button = document.querySelector("[data-copy]");
const said = document.querySelector("[data-copied]");

button.hidden = !navigator.clipboard;
button.addEventListener("click", async () => {
  try {
    await navigator.clipboard.writeText(secret.textContent);
    said.textContent = "Copied.";
  } catch {
    said.textContent = "The browser does not allow it: select the key and copy it by hand.";
    getSelection().selectAllChildren(secret);
  }
});
