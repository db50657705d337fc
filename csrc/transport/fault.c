// SPDX-License-Identifier: Apache-2.0
#define _GNU_SOURCE 1
#include "transport/fault.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

#include "util/util.h"

#define NS_PER_S  1000000000ull
#define NS_PER_MS 1000000ull

enum fault_state {
	FAULT_UP,
	FAULT_FAILING, /* the submitter is being told: what is dropped now is still held */
	FAULT_DOWN     /* nothing is held */
};

/* Stands in for a transfer below, so that its end passes through here. */
struct held {
	struct iswi_xfer below; /* what the queue below sees */
	struct iswi_xfer *xfer; /* the submitter's */
	struct iswi_fault *fault;
	struct iswi_fault_rule rule;
	bool hit; /* rule is valid */
	int error;
	uint64_t due_ns; /* UINT64_MAX: when the queue goes down */
	struct held *next;
};

struct live_rule {
	struct iswi_fault_rule rule;
	uint64_t seen;
};

struct iswi_fault {
	struct iswi_queue base;
	struct iswi_queue *below;
	struct iswi_queue_events events;
	pthread_t thread; /* ends what was delayed */

	pthread_mutex_t lock; /* a leaf: no callback runs under it */
	/* All under lock. */
	pthread_cond_t changed;
	enum fault_state state;
	int down_error; /* ours, 0: what the queue below says */
	bool stop;
	uint32_t users; /* threads inside submit; destroy waits for them */
	struct live_rule rule[ISWI_FAULT_RULES_MAX];
	uint32_t rules;
	struct held *held; /* no order */
	uint32_t held_count;
};

static void held_end(struct held *held, int error)
{
	struct iswi_xfer *xfer = held->xfer;

	free(held);
	xfer->done(xfer, error);
}

/* False when the queue is down, so that nobody would ever end it. */
static bool hold(struct iswi_fault *fault, struct held *held, uint64_t due_ns)
{
	bool up;

	pthread_mutex_lock(&fault->lock);
	up = fault->state != FAULT_DOWN;
	if (up) {
		held->due_ns = due_ns;
		held->next = fault->held;
		fault->held = held;
		fault->held_count++;
		pthread_cond_broadcast(&fault->changed);
	}
	pthread_mutex_unlock(&fault->lock);
	return up;
}

/* Lock held. Unlinks those due by now_ns; *next_ns: when the next one is. */
static struct held *take_due(struct iswi_fault *fault, uint64_t now_ns, uint64_t *next_ns)
{
	struct held **link = &fault->held, *due = NULL;

	*next_ns = UINT64_MAX;
	while (*link != NULL) {
		struct held *held = *link;

		if (held->due_ns > now_ns) {
			*next_ns = ISWI_MIN(*next_ns, held->due_ns);
			link = &held->next;
			continue;
		}
		*link = held->next;
		held->next = due;
		due = held;
		fault->held_count--;
	}
	return due;
}

static void *delay_main(void *arg)
{
	struct iswi_fault *fault = arg;

	pthread_mutex_lock(&fault->lock);
	while (!fault->stop) {
		uint64_t next_ns;
		struct held *due = take_due(fault, iswi_now_ns(), &next_ns);
		struct timespec until = {
			.tv_sec = (time_t)(next_ns / NS_PER_S),
			.tv_nsec = (long)(next_ns % NS_PER_S),
		};

		if (due == NULL && next_ns == UINT64_MAX) {
			pthread_cond_wait(&fault->changed, &fault->lock);
		} else if (due == NULL) {
			pthread_cond_timedwait(&fault->changed, &fault->lock, &until);
		} else {
			pthread_mutex_unlock(&fault->lock);
			while (due != NULL) {
				struct held *next = due->next;

				held_end(due, due->error);
				due = next;
			}
			pthread_mutex_lock(&fault->lock);
		}
	}
	pthread_mutex_unlock(&fault->lock);
	return NULL;
}

/* ---------------------------------------------------------------- from below */

static void corrupt(const struct held *held)
{
	const struct iswi_fault_rule *rule = &held->rule;
	uint8_t *data = held->xfer->buf;
	uint64_t end = held->xfer->length;

	if (held->xfer->kind != ISWI_XFER_READ || held->error != 0)
		return;
	if (rule->corrupt_bytes != 0)
		end = ISWI_MIN(end, (uint64_t)rule->corrupt_at + rule->corrupt_bytes);
	for (uint64_t i = rule->corrupt_at; i < end; i++)
		data[i] ^= 0xff;
}

static void below_done(struct iswi_xfer *below, int error)
{
	struct held *held = ISWI_CONTAINER(below, struct held, below);
	struct iswi_fault *fault = held->fault;
	int down_error;

	pthread_mutex_lock(&fault->lock);
	down_error = fault->state == FAULT_UP ? 0 : fault->down_error;
	pthread_mutex_unlock(&fault->lock);
	/* We shut the queue below down in another one's name. */
	held->error = error == -ESHUTDOWN && down_error != 0 ? down_error : error;
	if (held->hit && held->error == 0) {
		switch (held->rule.action) {
		case ISWI_FAULT_DELAY:
			if (hold(fault, held, iswi_now_ns() + held->rule.delay_ms * NS_PER_MS))
				return;
			break;
		case ISWI_FAULT_DROP_REPLY:
			if (hold(fault, held, UINT64_MAX))
				return;
			break;
		case ISWI_FAULT_CORRUPT:
			corrupt(held);
			break;
		default:
			break;
		}
	}
	held_end(held, held->error);
}

static void below_down(void *ctx, int error)
{
	struct iswi_fault *fault = ctx;
	struct held *held;
	uint64_t next_ns;

	pthread_mutex_lock(&fault->lock);
	fault->state = FAULT_FAILING;
	if (fault->down_error != 0)
		error = fault->down_error;
	pthread_mutex_unlock(&fault->lock);
	fault->events.down(fault->events.ctx, error);
	pthread_mutex_lock(&fault->lock);
	fault->state = FAULT_DOWN;
	held = take_due(fault, UINT64_MAX, &next_ns);
	pthread_mutex_unlock(&fault->lock);
	while (held != NULL) {
		struct held *next = held->next;

		held_end(held, error);
		held = next;
	}
}

static void below_slow(struct iswi_xfer *below, uint32_t received)
{
	struct held *held = ISWI_CONTAINER(below, struct held, below);

	held->xfer->slow(held->xfer, received);
	below->buf = held->xfer->buf;
}

/* ---------------------------------------------------------------- from above */

static bool rule_matches(const struct iswi_fault_rule *rule, const struct iswi_xfer *xfer)
{
	return (rule->kinds &
		(xfer->kind == ISWI_XFER_READ ? ISWI_FAULT_READS : ISWI_FAULT_WRITES)) != 0;
}

/* Fills held->rule with the one that hits. */
static void judge(struct iswi_fault *fault, struct held *held)
{
	pthread_mutex_lock(&fault->lock);
	for (uint32_t i = 0; i < fault->rules; i++) {
		struct live_rule *live = &fault->rule[i];
		uint64_t n;

		if (!rule_matches(&live->rule, held->xfer))
			continue;
		n = live->seen++;
		if (held->hit || n < live->rule.skip ||
		    (live->rule.count != 0 && n - live->rule.skip >= live->rule.count))
			continue;
		held->hit = true;
		held->rule = live->rule;
	}
	pthread_mutex_unlock(&fault->lock);
}

static void go_down(struct iswi_fault *fault, int error)
{
	pthread_mutex_lock(&fault->lock);
	if (fault->state == FAULT_UP && fault->down_error == 0)
		fault->down_error = error;
	pthread_mutex_unlock(&fault->lock);
	fault->below->ops->shutdown(fault->below);
}

/* Goes on below: true. Else it was ended or is held. */
static bool admit(struct iswi_fault *fault, struct held *held)
{
	int error = held->rule.error;

	if (!held->hit)
		return true;
	switch (held->rule.action) {
	case ISWI_FAULT_FAIL:
		held_end(held, error);
		return false;
	case ISWI_FAULT_DROP:
		/* One that is down already says so itself. */
		return !hold(fault, held, UINT64_MAX);
	case ISWI_FAULT_DOWN:
		if (!hold(fault, held, UINT64_MAX))
			return true;
		go_down(fault, error);
		return false;
	default:
		return true;
	}
}

static void fault_submit(struct iswi_queue *queue, struct iswi_xfer *xfer)
{
	struct iswi_fault *fault = ISWI_CONTAINER(queue, struct iswi_fault, base);
	struct iswi_queue *below = fault->below;
	struct iswi_xfer *first = NULL, **link = &first;

	pthread_mutex_lock(&fault->lock);
	fault->users++;
	pthread_mutex_unlock(&fault->lock);
	while (xfer != NULL) {
		struct iswi_xfer *next = xfer->next;
		struct held *held = calloc(1, sizeof(*held));

		if (held == NULL) {
			xfer->done(xfer, -ENOMEM);
			xfer = next;
			continue;
		}
		held->fault = fault;
		held->xfer = xfer;
		held->below.kind = xfer->kind;
		held->below.offset = xfer->offset;
		held->below.length = xfer->length;
		held->below.buf = xfer->buf;
		held->below.done = below_done;
		held->below.slow = below_slow;
		held->below.slow_us = xfer->slow_us;
		xfer->submitted_ns = iswi_now_ns();
		judge(fault, held);
		if (admit(fault, held)) {
			*link = &held->below;
			link = &held->below.next;
		}
		xfer = next;
	}
	if (first != NULL)
		below->ops->submit(below, first);
	pthread_mutex_lock(&fault->lock);
	fault->users--;
	pthread_cond_broadcast(&fault->changed);
	pthread_mutex_unlock(&fault->lock);
}

static void fault_shutdown(struct iswi_queue *queue)
{
	struct iswi_fault *fault = ISWI_CONTAINER(queue, struct iswi_fault, base);

	fault->below->ops->shutdown(fault->below);
}

static void fault_destroy(struct iswi_queue *queue)
{
	struct iswi_fault *fault = ISWI_CONTAINER(queue, struct iswi_fault, base);

	/* It goes down, which ends what is held; a submitter may still be on its way out. */
	fault->below->ops->shutdown(fault->below);
	pthread_mutex_lock(&fault->lock);
	while (fault->users > 0)
		pthread_cond_wait(&fault->changed, &fault->lock);
	pthread_mutex_unlock(&fault->lock);
	fault->below->ops->destroy(fault->below);
	iswi_fault_abandon(fault);
}

static const struct iswi_transport_ops fault_ops = {
	.name = "fault",
	.submit = fault_submit,
	.shutdown = fault_shutdown,
	.destroy = fault_destroy,
};

/* ---------------------------------------------------------------- making and freeing */

static void fault_free(struct iswi_fault *fault)
{
	pthread_cond_destroy(&fault->changed);
	pthread_mutex_destroy(&fault->lock);
	free(fault);
}

int iswi_fault_create(const struct iswi_queue_events *events, struct iswi_fault **fault_out,
		      struct iswi_queue_events *below_events_out)
{
	struct iswi_fault *fault;
	pthread_condattr_t attr;
	int err;

	fault = calloc(1, sizeof(*fault));
	if (fault == NULL)
		return -ENOMEM;
	fault->base.ops = &fault_ops;
	fault->events = *events;
	pthread_mutex_init(&fault->lock, NULL);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&fault->changed, &attr);
	pthread_condattr_destroy(&attr);
	err = iswi_thread_start(&fault->thread, "isw-fault", delay_main, fault);
	if (err < 0) {
		fault_free(fault);
		return err;
	}
	*below_events_out = (struct iswi_queue_events){.down = below_down, .ctx = fault};
	*fault_out = fault;
	return 0;
}

struct iswi_queue *iswi_fault_attach(struct iswi_fault *fault, struct iswi_queue *below)
{
	fault->below = below;
	return &fault->base;
}

void iswi_fault_abandon(struct iswi_fault *fault)
{
	if (fault == NULL)
		return;
	pthread_mutex_lock(&fault->lock);
	fault->stop = true;
	pthread_cond_broadcast(&fault->changed);
	pthread_mutex_unlock(&fault->lock);
	pthread_join(fault->thread, NULL);
	fault_free(fault);
}

int iswi_fault_add(struct iswi_fault *fault, const struct iswi_fault_rule *rule)
{
	bool needs_error = rule->action == ISWI_FAULT_FAIL || rule->action == ISWI_FAULT_DOWN;
	int err = 0;

	if ((rule->kinds & (ISWI_FAULT_READS | ISWI_FAULT_WRITES)) == 0 ||
	    (needs_error && rule->error >= 0))
		return -EINVAL;
	pthread_mutex_lock(&fault->lock);
	if (fault->rules < ISWI_FAULT_RULES_MAX)
		fault->rule[fault->rules++] = (struct live_rule){.rule = *rule};
	else
		err = -ENOSPC;
	pthread_mutex_unlock(&fault->lock);
	return err;
}

void iswi_fault_clear(struct iswi_fault *fault)
{
	pthread_mutex_lock(&fault->lock);
	fault->rules = 0;
	pthread_mutex_unlock(&fault->lock);
}

uint32_t iswi_fault_held(struct iswi_fault *fault)
{
	uint32_t count;

	pthread_mutex_lock(&fault->lock);
	count = fault->held_count;
	pthread_mutex_unlock(&fault->lock);
	return count;
}
