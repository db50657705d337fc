// SPDX-License-Identifier: Apache-2.0
// The WebSocket: signs in with the link of the address or the session of this tab, and comes back
// when the daemon does.

const KEY = "infiniswap-session";
const AGAIN_MS = [1000, 2000, 5000];

/** The link behind #, taken out of the address: it is good once, and nobody shall copy it. */
function takeLink() {
  const link = location.hash.slice(1);
  if (link) history.replaceState(null, "", location.pathname);
  return link;
}

/** Connects for as long as the page is open.
 *  on.message(message): a look, or the past; on.out(why): the browser may not read;
 *  on.lost(): no connection; it is tried again. */
export function connect(on) {
  let link = takeLink();
  let failures = 0;

  function dial() {
    const socket = new WebSocket(`wss://${location.host}/ui/live`);
    let isOut = false;
    socket.addEventListener("open", () => {
      const session = sessionStorage.getItem(KEY) ?? "";
      socket.send(JSON.stringify(link ? { link } : session ? { session } : {}));
      link = "";
    });
    socket.addEventListener("message", (event) => {
      const message = JSON.parse(event.data);
      if (message.kind === "in") {
        failures = 0;
        if (message.session) sessionStorage.setItem(KEY, message.session);
      } else if (message.kind === "out") {
        isOut = message.sign_in;
        if (isOut) sessionStorage.removeItem(KEY);
        on.out(message.why);
      } else {
        on.message(message);
      }
    });
    socket.addEventListener("close", () => {
      if (isOut) return;
      on.lost();
      setTimeout(dial, AGAIN_MS[Math.min(failures, AGAIN_MS.length - 1)]);
      failures += 1;
    });
  }

  // A link for this very page, put into its address by hand, reloads nothing.
  addEventListener("hashchange", () => {
    if (location.hash.length > 1) location.reload();
  });
  dial();
}
