"""A node that runs until the test lets it go on, and a process that is no ComfyUI and has no pid."""

from comfy import process_memory


class ProbeWait:
    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"fifo": ("STRING", {})}}

    RETURN_TYPES = ()
    FUNCTION = "wait"
    CATEGORY = "probe"
    OUTPUT_NODE = True

    def wait(self, fifo):
        with open(fifo) as end:
            end.read()
        return ()


class LanguageServer(process_memory.ProcessMemoryProvider):
    name = "language server"
    inline_counting = True
    holds = 4 << 20

    def usage(self, device):
        return process_memory.DeviceUsage(resident=self.holds, claimed=2 << 20, committed=self.holds, reclaimable=self.holds, busy=False)

    def candidates(self, device):
        return (process_memory.Candidate(id="1", name="Llama", resident=self.holds, size=self.holds),) if self.holds else ()

    def release(self, request):
        freed, self.holds = self.holds, 0
        return process_memory.Receipt(outcome=process_memory.Outcome.FREED, freed=freed, resident=0)


process_memory.register_process_memory_provider(LanguageServer())
NODE_CLASS_MAPPINGS = {"ProbeWait": ProbeWait}
