// Replaces the part of the page that changes, every two seconds while the page is seen.
"use strict";
const main = document.querySelector("main");
const lost = document.getElementById("lost");
async function renew() {
  if (document.hidden) return;
  try {
    const answer = await fetch("/part", { cache: "no-store" });
    if (!answer.ok) throw new Error(String(answer.status));
    main.innerHTML = await answer.text();
    lost.hidden = true;
  } catch {
    lost.hidden = false;
  }
}
setInterval(renew, 2000);
document.addEventListener("visibilitychange", renew);
