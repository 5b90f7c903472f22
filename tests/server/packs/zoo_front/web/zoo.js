import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

app.registerExtension({
    name: "zoo.front",
    async setup() {
        const answer = await api.fetchApi("/zoo/pid");
        document.body.dataset.zoo = (await answer.json()).pid;
    },
});
