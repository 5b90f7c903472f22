"""Nodes in the newer style, with every kind of input."""

import os

from comfy_api.latest import ComfyExtension, io, ui

api_progress = None


class ZooEverything(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        template = io.MatchType.Template("t", [io.Image, io.Mask])
        return io.Schema(
            node_id="ZooEverything", display_name="Everything (zoo)", category="zoo/newer", description="Every kind of input.",
            search_aliases=["zoo"], is_experimental=True, is_output_node=True,
            inputs=[
                io.Int.Input("count", default=2, min=0, max=9, step=1, tooltip="how many", control_after_generate=True),
                io.Float.Input("scale", default=1.5, min=0.0, max=4.0, display_mode=io.NumberDisplay.slider),
                io.String.Input("text", multiline=True, placeholder="say"),
                io.Boolean.Input("flag", default=True, label_on="yes", label_off="no"),
                io.Combo.Input("pick", options=["one", "two"], default="two"),
                io.Custom("ZOOTYPE").Input("own", optional=True),
                io.AnyType.Input("any", optional=True),
                io.MultiType.Input("either", [io.Image, io.Mask], optional=True),
                io.MatchType.Input("matched", template=template, optional=True),
                io.Autogrow.Input("many", template=io.Autogrow.TemplatePrefix(io.Int.Input("n", optional=True), prefix="n", min=1, max=4), optional=True),
                io.DynamicCombo.Input("kind", options=[
                    io.DynamicCombo.Option("plain", []),
                    io.DynamicCombo.Option("fancy", [io.Int.Input("level", default=1), io.String.Input("label", default="x")]),
                ]),
            ],
            outputs=[io.Int.Output("n", display_name="N"), io.String.Output(tooltip="what came"), io.MatchType.Output(template=template, display_name="m")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, count, scale, text, flag, pick, kind, own=None, any=None, either=None, matched=None, many=None):
        said = {"count": count, "scale": scale, "text": text, "flag": flag, "pick": pick, "kind": kind, "many": many, "id": cls.hidden.unique_id,
                "prompt": sorted(cls.hidden.prompt or {})}
        return io.NodeOutput(count, repr(sorted(said)), matched, ui={"said": [said], "pid": [os.getpid()]})


class ZooFingerprint(io.ComfyNode):
    asked = []

    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="ZooFingerprint", category="zoo/newer", inputs=[io.Int.Input("seed", default=0)], outputs=[io.Int.Output()],
                         is_output_node=True)

    @classmethod
    def fingerprint_inputs(cls, seed):
        ZooFingerprint.asked.append(seed)
        return seed // 2

    @classmethod
    def validate_inputs(cls, seed):
        return True if seed >= 0 else "seed is negative"

    @classmethod
    def execute(cls, seed):
        asked, ZooFingerprint.asked = ZooFingerprint.asked, []
        return io.NodeOutput(seed, ui={"asked": [asked]})


class ZooLazyV3(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="ZooLazyV3", category="zoo/newer", inputs=[io.Boolean.Input("first"), io.Int.Input("a", lazy=True), io.Int.Input("b", lazy=True)],
                         outputs=[io.Int.Output()], is_output_node=True)

    @classmethod
    def check_lazy_status(cls, first, a=None, b=None):
        return ["a" if first else "b"]

    @classmethod
    def execute(cls, first, a=None, b=None):
        return io.NodeOutput(a if first else b, ui={"values": [[a, b]]})


class ZooLazyGrown(io.ComfyNode):
    """Asks for one of any number of inputs."""
    seen = []

    @classmethod
    def define_schema(cls):
        template = io.Autogrow.TemplatePrefix(io.Int.Input("v", lazy=True), prefix="v", min=3, max=5)
        return io.Schema(node_id="ZooLazyGrown", category="zoo/newer", inputs=[io.String.Input("pick"), io.Autogrow.Input("values", template=template)],
                         outputs=[io.Int.Output()], is_output_node=True)

    @classmethod
    def check_lazy_status(cls, pick, values):
        ZooLazyGrown.seen.append(dict(values))
        return [] if values.get(pick) is not None else [f"values.{pick}"]

    @classmethod
    def execute(cls, pick, values):
        seen, ZooLazyGrown.seen = ZooLazyGrown.seen, []
        return io.NodeOutput(values[pick], ui={"values": [dict(values)], "seen": [seen]})


class ZooAsyncV3(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="ZooAsyncV3", category="zoo/newer", inputs=[io.Int.Input("seed", default=0)], outputs=[io.Int.Output()], is_output_node=True)

    @classmethod
    async def execute(cls, seed):
        from comfy_api.latest import ComfyAPI
        await ComfyAPI().execution.set_progress(3, 5)
        return io.NodeOutput(seed + 1, ui=ui.PreviewText(f"seed {seed}"))


class ZooBlockV3(io.ComfyNode):
    @classmethod
    def define_schema(cls):
        return io.Schema(node_id="ZooBlockV3", category="zoo/newer", inputs=[io.Boolean.Input("block")], outputs=[io.Int.Output()])

    @classmethod
    def execute(cls, block):
        return io.NodeOutput(None, block_execution="blocked by the zoo") if block else io.NodeOutput(1)


class ZooExtension(ComfyExtension):
    async def get_node_list(self):
        return [ZooEverything, ZooFingerprint, ZooLazyV3, ZooLazyGrown, ZooAsyncV3, ZooBlockV3]


async def comfy_entrypoint():
    return ZooExtension()
