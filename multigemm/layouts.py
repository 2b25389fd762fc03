"""The public name of `multigemm.planning.operands`: what backends of other packages import."""

from multigemm.cuda.device import to_device as to_device
from multigemm.planning.operands import TABLE as TABLE
from multigemm.planning.operands import Operands as Operands
from multigemm.planning.operands import Packed as Packed
from multigemm.planning.operands import Strided as Strided
from multigemm.planning.operands import group_table as group_table
from multigemm.planning.operands import packed as packed
