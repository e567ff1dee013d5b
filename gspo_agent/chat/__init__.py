"""Messages to token ids, the bridge to the next turn, token ids to a message. The only room that knows `renderers`."""

from gspo_agent.chat.base import Chat
from gspo_agent.chat.load import load_chat
from gspo_agent.chat.renderer import RendererChat
from gspo_agent.chat.template import TemplateChat

__all__ = ["Chat", "RendererChat", "TemplateChat", "load_chat"]
