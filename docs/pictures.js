// Pictures follow the scheme that the reader chose on the site, which may differ from the system's.
"use strict";

const sources = document.querySelectorAll('picture > source[media="(prefers-color-scheme: dark)"]');

function followScheme() {
  const dark = document.body.dataset.mdColorScheme === "slate";
  for (const source of sources) source.media = dark ? "all" : "not all";
}

followScheme();
new MutationObserver(followScheme).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
