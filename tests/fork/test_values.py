"""Values of ComfyUI's own classes on the wire."""

import io
from fractions import Fraction

import numpy as np
import pytest
import torch

from tests.unit import value_peer


@pytest.fixture
def pair():
    pair = value_peer.Pair()
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def film():
    """A short film, as a file in memory."""
    import av
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = 32
        for number in range(16):
            frame = av.VideoFrame.from_ndarray(np.full((32, 32, 3), number * 10, np.uint8))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def shown(video):
    parts = video.get_components()
    return parts.images, parts.frame_rate, video.get_dimensions()


def test_a_video_from_a_file_arrives(pair, film, tmp_path):
    from comfy_api.latest import InputImpl
    path = tmp_path / "film.mp4"
    path.write_bytes(film)
    for video in (InputImpl.VideoFromFile(str(path)), InputImpl.VideoFromFile(io.BytesIO(film)),
                  InputImpl.VideoFromFile(io.BytesIO(film), start_time=0.5, duration=1)):
        arrived = pair.to_host([video])[0]
        assert type(arrived) is type(video)
        assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(shown(arrived), shown(video), strict=True))


def test_a_video_from_pictures_and_sound_arrives(pair):
    from comfy_api.latest import InputImpl, Types
    sound = {"waveform": torch.rand(1, 2, 4410), "sample_rate": 44100}
    video = InputImpl.VideoFromComponents(Types.VideoComponents(images=torch.rand(4, 32, 32, 3), audio=sound, frame_rate=Fraction(30000, 1001)))
    arrived = pair.to_worker(video)
    parts = arrived.get_components()
    assert type(arrived) is type(video) and parts.images.equal(video.get_components().images)
    assert parts.frame_rate == Fraction(30000, 1001) and parts.audio["waveform"].equal(sound["waveform"])
    arrived.save_to(out := io.BytesIO())
    assert InputImpl.VideoFromFile(out).get_dimensions() == (32, 32)


def test_a_video_that_holds_what_cannot_cross_stays(pair):
    from comfy_api.latest import InputImpl
    from comfy_multiproc.handles import Handle
    video = InputImpl.VideoFromFile(open(value_peer.__file__, "rb"))
    handle = pair.to_host(video)
    assert type(handle) is Handle and pair.to_worker(handle) is video


def test_a_blocker_arrives_as_one(pair):
    from comfy_execution.graph_utils import ExecutionBlocker
    for message in (None, "no picture"):
        arrived, = pair.to_host((ExecutionBlocker(message),))
        assert type(arrived) is ExecutionBlocker and arrived.message == message


def test_meshes_and_curves_and_nested_latents_arrive(pair):
    from comfy.nested_tensor import NestedTensor
    from comfy_api.latest._input.curve_types import MonotoneCubicCurve
    from comfy_api.latest._util import MESH, SVG, File3D, VideoCodec
    mesh, latent, curve, svg, file, codec = pair.to_worker([
        MESH(torch.rand(1, 4, 3), torch.ones(1, 2, 3, dtype=torch.long)), {"samples": NestedTensor([torch.ones(2), torch.zeros(3)])},
        MonotoneCubicCurve([(0, 0), (0.5, 0.7), (1, 1)]), SVG([io.BytesIO(b"<svg/>")]), File3D(io.BytesIO(b"glTF"), "glb"), VideoCodec.H264])
    assert mesh.vertices.shape == (1, 4, 3) and mesh.uvs is None
    assert [t.tolist() for t in latent["samples"].unbind()] == [[1, 1], [0, 0, 0]]
    assert np.allclose(curve.interp(0.5), 0.7)
    assert svg.data[0].read() == b"<svg/>" and file.get_data().read() == b"glTF" and codec is VideoCodec.H264
