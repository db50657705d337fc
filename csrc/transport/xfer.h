/* SPDX-License-Identifier: Apache-2.0 */
/* What every transport does with transfers. */
#ifndef ISWI_TRANSPORT_XFER_H
#define ISWI_TRANSPORT_XFER_H

#include "transport/transport.h"

/* Ends each of the chain; the queue may be gone as soon as the last one was ended. */
static inline void iswi_xfer_end_chain(struct iswi_xfer *xfer, int error)
{
	while (xfer != NULL) {
		struct iswi_xfer *next = xfer->next;

		xfer->done(xfer, error);
		xfer = next;
	}
}

/* Puts a chain that ends with `last` at the end of a FIFO. */
static inline void iswi_xfer_append(struct iswi_xfer **fifo_first, struct iswi_xfer **fifo_last,
				    struct iswi_xfer *first, struct iswi_xfer *last)
{
	last->next = NULL;
	if (*fifo_first == NULL)
		*fifo_first = first;
	else
		(*fifo_last)->next = first;
	*fifo_last = last;
}

/* Whether it must be told when it takes long. */
static inline bool iswi_xfer_minds(const struct iswi_xfer *xfer)
{
	return xfer->kind == ISWI_XFER_READ && xfer->slow_us != 0;
}

/* Marks the transfer as told when it has become slow. It may be younger than now_ns. */
static inline bool iswi_xfer_became_slow(struct iswi_xfer *xfer, uint64_t now_ns)
{
	if (!iswi_xfer_minds(xfer) || now_ns < xfer->submitted_ns + xfer->slow_us * 1000ull)
		return false;
	xfer->slow_us = 0;
	return true;
}

#endif
