"""The models over a target's hidden states that our own layers make, by their architectures."""

from magicdec.architectures.block_config import BlockConfig
from magicdec.architectures.head_config import HeadConfig
from magicdec.architectures.mtp_config import MtpConfig
from magicdec.models.block import BlockHead
from magicdec.models.head import Head
from magicdec.models.mtp_head import MtpHead
from magicdec.models.states_model import StatesModel

HEADS: dict[type, type[StatesModel]] = {
    HeadConfig: Head,
    MtpConfig: MtpHead,
    BlockConfig: BlockHead,
}
