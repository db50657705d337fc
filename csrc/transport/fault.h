/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A layer over another queue that breaks it by rules, for tests. Unlike a real transport it
 * allocates for each transfer.
 *
 * To make one takes two steps, because the queue below must know from its start whom to tell that
 *it is down:
 *
 *	iswi_fault_create(&events, &fault, &below_events);
 *	iswi_tcp_connect(&config, &below_events, &below, NULL);
 *	queue = iswi_fault_attach(fault, below);
 *
 * The promises of transport.h hold for the layer too: each transfer is ended once, the down
 * callback comes before any end because of it, nothing touches a buffer after done.
 */
#ifndef ISWI_FAULT_H
#define ISWI_FAULT_H

#include <stdint.h>

#include "transport/transport.h"

enum iswi_fault_action {
	ISWI_FAULT_FAIL,       /* ended with `error`; never sent */
	ISWI_FAULT_DELAY,      /* carried out at once, ended delay_ms later */
	ISWI_FAULT_DROP,       /* never sent, ended only when the queue goes down */
	ISWI_FAULT_DROP_REPLY, /* carried out, ended only when the queue goes down */
	ISWI_FAULT_CORRUPT, /* carried out; of a READ's bytes those from corrupt_at on are inverted
			     */
	ISWI_FAULT_DOWN     /* never sent; the queue goes down with `error` */
};

#define ISWI_FAULT_READS  0x1
#define ISWI_FAULT_WRITES 0x2

struct iswi_fault_rule {
	enum iswi_fault_action action;
	uint32_t kinds; /* ISWI_FAULT_READS | ISWI_FAULT_WRITES */
	uint64_t skip;  /* transfers of these kinds, counted from the rule's start, let through */
	uint64_t count; /* then so many are hit; 0: all */
	int error;
	uint32_t delay_ms;
	uint32_t corrupt_at;    /* offset in the transfer */
	uint32_t corrupt_bytes; /* 0: to its end */
};

#define ISWI_FAULT_RULES_MAX 8

struct iswi_fault;

/* *events is copied. */
int iswi_fault_create(const struct iswi_queue_events *events, struct iswi_fault **fault_out,
		      struct iswi_queue_events *below_events_out);
/* below is taken: destroyed with the layer. Nothing can fail. */
struct iswi_queue *iswi_fault_attach(struct iswi_fault *fault, struct iswi_queue *below);
/* Only for one that never got a queue attached; accepts NULL. */
void iswi_fault_abandon(struct iswi_fault *fault);

/*
 * Any thread. The first rule that hits a transfer decides; every rule counts it. -ENOSPC beyond
 * ISWI_FAULT_RULES_MAX, -EINVAL for a rule that cannot hit or lacks its error.
 */
int iswi_fault_add(struct iswi_fault *fault, const struct iswi_fault_rule *rule);
/* Any thread. Removes all rules; what is held stays held. */
void iswi_fault_clear(struct iswi_fault *fault);
/* Any thread. How many transfers wait for the queue's end or a delay's. */
uint32_t iswi_fault_held(struct iswi_fault *fault);

#endif
