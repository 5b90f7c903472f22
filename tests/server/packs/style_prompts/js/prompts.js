import { api } from "../../scripts/api.js";

api.addEventListener("style_prompts.saved", ({ detail }) => { document.body.dataset.prompts = detail.names.join(" "); });
