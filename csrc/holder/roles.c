/* SPDX-License-Identifier: Apache-2.0 */
/* Who serves, who is next, and what a death means. */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "holder/holder.h"
#include "util/util.h"

#define SECOND_NS 1000000000ull
/* Starting an interpreter on a machine that is short of memory takes its time. */
#define STANDBY_NS (180 * SECOND_NS)
/* The successor waits for its predecessor's last writes, and those for a slow disk. */
#define TAKE_OVER_NS (300 * SECOND_NS)
/* A process that has served this long did not die of its start, which takes as long. */
#define STEADY_NS       SECOND_NS
#define BACK_OFF_NS     (SECOND_NS / 10)
#define BACK_OFF_NS_MAX (10 * SECOND_NS)
/* After a standby whose code cannot take over: other code may be installed meanwhile. */
#define REFUSED_NS (60 * SECOND_NS)
/* Of InfiniswapError: a standby says why, not with which code it ends. */
#define EXIT_HOPELESS 1

static const char *const no_standby = "standby none ";

/* Doubles with each death in a row; never gives up, as the device may hold programs' memory. */
static uint64_t back_off_ns(uint32_t failures)
{
	uint64_t ns = BACK_OFF_NS;

	for (uint32_t i = 1; i < failures && ns < BACK_OFF_NS_MAX; i++)
		ns *= 2;
	return failures == 0 ? 0 : ISWI_MIN(ns, BACK_OFF_NS_MAX);
}

static void tell_active(struct iswi_holder *holder, const char *before, const char *text)
{
	char packet[ISWI_HOLD_TEXT_MAX + 64];

	snprintf(packet, sizeof(packet), "%s%s", before, text);
	packet[ISWI_HOLD_TEXT_MAX - 1] = '\0';
	(void)iswi_child_tell(&holder->active, packet, NULL, 0);
}

static bool said_ring(struct iswi_child *child, const char *text)
{
	if (strncmp(text, "ring ", 5) != 0)
		return false;
	iswi_child_hold_ring(child, atoi(text + 5));
	return true;
}

static void finish(struct iswi_holder *holder, int exit_code)
{
	iswi_child_end(&holder->standby);
	iswi_child_end(&holder->fresh);
	holder->exit_code = exit_code;
	holder->phase = ISWI_HOLD_DONE;
}

int iswi_roles_start(struct iswi_holder *holder)
{
	holder->active.sock = holder->standby.sock = holder->fresh.sock = -1;
	holder->phase = ISWI_HOLD_STARTING;
	return iswi_child_start(&holder->active, &holder->first);
}

/* ------------------------------------------------------------------- standbys */

static void prepare(struct iswi_holder *holder, struct iswi_child *child)
{
	char names[ISWI_HOLD_NAMES_MAX], packet[ISWI_HOLD_TEXT_MAX];
	int fds[ISWI_HOLD_KEPT_MAX];
	uint32_t count = iswi_keep_list(&holder->keep, true, names, fds);

	snprintf(packet, sizeof(packet), "prepare %s", names);
	/* A child that does not hear it will not be ready in time. */
	(void)iswi_child_tell(child, packet, fds, count);
	child->until_ns = iswi_now_ns() + STANDBY_NS;
	child->told = true;
}

/* The first standby starts while the first process does: later it would take processor time from
 * the programs that the device serves. It prepares once that process serves. */
static void start_waiting(struct iswi_holder *holder, struct iswi_child *child)
{
	if (iswi_child_start(child, &holder->others) != 0) {
		holder->failures++;
		holder->spawn_ns = iswi_now_ns() + back_off_ns(holder->failures);
		return;
	}
	if (holder->phase != ISWI_HOLD_STARTING)
		prepare(holder, child);
}

static void standby_failed(struct iswi_holder *holder, const char *why, uint64_t pause_ns)
{
	iswi_child_end(&holder->standby);
	holder->failures++;
	holder->spawn_ns = iswi_now_ns() + ISWI_MAX(pause_ns, back_off_ns(holder->failures));
	tell_active(holder, no_standby, why);
}

static void fresh_failed(struct iswi_holder *holder, const char *why)
{
	iswi_child_end(&holder->fresh);
	tell_active(holder, "refused ", why);
}

static void now_ready(struct iswi_holder *holder, struct iswi_child *child)
{
	child->ready = true;
	child->until_ns = 0;
	holder->failures = 0;
	if (child == &holder->fresh) {
		if (holder->fresh_program[0]) {
			memcpy(holder->program, holder->fresh_program, sizeof(holder->program));
			holder->others.argv[0] = holder->program;
		}
		iswi_child_end(&holder->standby);
		holder->standby = *child;
		*child = (struct iswi_child){.sock = -1};
		tell_active(holder, "renewed", "");
	}
	tell_active(holder, "standby ready", "");
}

/* What follows the word, or NULL where it is another one. */
static const char *said(const char *word, const char *text)
{
	size_t length = strlen(word);

	return strncmp(text, word, length) == 0 ? text + length : NULL;
}

/* True when it said that it cannot take over: it is dealt with. */
static bool said_no(struct iswi_holder *holder, struct iswi_child *child, const char *text)
{
	const char *hopeless = said("hopeless ", text);
	const char *why = hopeless ? hopeless : said("refused ", text);

	if (!why)
		return false;
	/* A process that serves, or takes over, knows better. */
	if (hopeless && holder->phase == ISWI_HOLD_ORPHANED)
		finish(holder, EXIT_HOPELESS);
	else if (child == &holder->fresh)
		fresh_failed(holder, why);
	else
		standby_failed(holder, why, REFUSED_NS);
	return true;
}

static void hear_waiting(struct iswi_holder *holder, struct iswi_child *child)
{
	char text[ISWI_HOLD_TEXT_MAX + 1];
	ssize_t got;
	int fd;

	while ((got = iswi_child_hear(child, text, &fd)) > 0) {
		if (fd >= 0)
			close(fd);
		if (strcmp(text, "standby") == 0) {
			now_ready(holder, child);
			return;
		}
		if (said_ring(child, text))
			continue;
		if (said_no(holder, child, text))
			return;
	}
	/* A child that has closed its end cannot be told anything: end it. */
	if (got < 0 && iswi_child_is(child))
		kill(child->pid, SIGKILL);
}

/* ------------------------------------------------------------------ take-overs */

static void take_over(struct iswi_holder *holder)
{
	char names[ISWI_HOLD_NAMES_MAX], packet[ISWI_HOLD_TEXT_MAX];
	int fds[ISWI_HOLD_KEPT_MAX];
	uint32_t count = iswi_keep_list(&holder->keep, false, names, fds);

	snprintf(packet, sizeof(packet), "take-over %" PRIu32 " %" PRIu64 " %s %s",
		 holder->take_overs + 1, holder->died_ns, holder->reason, names);
	if (iswi_child_tell(&holder->standby, packet, fds, count) != 0) {
		/* Sending descriptors takes memory. Tries again, as nothing else would tell it. */
		holder->take_over_ns = iswi_now_ns() + BACK_OFF_NS;
		return;
	}
	holder->active = holder->standby;
	holder->standby = (struct iswi_child){.sock = -1};
	holder->active.until_ns = iswi_now_ns() + TAKE_OVER_NS;
	holder->phase = ISWI_HOLD_TAKING_OVER;
	holder->take_overs++;
}

static const char *reason_of(bool by_signal, int number)
{
	if (by_signal)
		return number == SIGKILL ? "killed" : "crashed";
	return "exited";
}

static void active_died(struct iswi_holder *holder, bool by_signal, int number)
{
	uint64_t now = iswi_now_ns();
	bool served = holder->phase == ISWI_HOLD_SERVING;

	if (holder->active.sock >= 0)
		close(holder->active.sock);
	/* Not sooner: see `ring`. Nor later, as the kernel waits for it before a take-over. */
	iswi_rings_close(&holder->active.rings);
	holder->active = (struct iswi_child){.sock = -1};
	if (holder->ended || (!served && holder->phase != ISWI_HOLD_TAKING_OVER)) {
		finish(holder, by_signal ? 128 + number : number);
		return;
	}
	if (served) {
		holder->died_ns = now;
		if (!holder->reason)
			holder->reason = reason_of(by_signal, number);
		if (holder->yielding || now - holder->served_ns > STEADY_NS)
			holder->deaths = 0;
		holder->yielding = false;
	}
	if (iswi_child_is(&holder->fresh))
		iswi_child_end(&holder->fresh); /* who asked for it is gone */
	holder->take_over_ns = now + back_off_ns(holder->deaths);
	holder->deaths++;
	holder->phase = ISWI_HOLD_ORPHANED;
}

/* ------------------------------------------------------------- the active process */

static void now_serving(struct iswi_holder *holder)
{
	if (holder->phase == ISWI_HOLD_STARTING || holder->phase == ISWI_HOLD_TAKING_OVER) {
		holder->served_ns = iswi_now_ns();
		holder->active.until_ns = 0;
		holder->reason = NULL;
		if (holder->active.rings.error)
			tell_active(holder, "unheld ", strerror(-holder->active.rings.error));
		if (holder->signal_wanted)
			kill(holder->active.pid, holder->signal_wanted);
	} else {
		holder->signal_wanted = 0; /* it was asked to end, and goes on */
	}
	holder->ended = false;
	holder->phase = ISWI_HOLD_SERVING;
}

static void renew(struct iswi_holder *holder, const char *program)
{
	char *before = holder->others.argv[0];

	if (holder->phase != ISWI_HOLD_SERVING) {
		tell_active(holder, "refused ", "the device does not serve");
		return;
	}
	if (iswi_child_is(&holder->fresh)) {
		tell_active(holder, "refused ", "another restart is under way");
		return;
	}
	if (strlen(program) >= sizeof(holder->fresh_program) || (*program && *program != '/')) {
		tell_active(holder, "refused ", "its program has no path that can be used");
		return;
	}
	strcpy(holder->fresh_program, program);
	if (*program)
		holder->others.argv[0] = holder->fresh_program;
	start_waiting(holder, &holder->fresh);
	holder->others.argv[0] = before;
	if (!iswi_child_is(&holder->fresh))
		fresh_failed(holder, "its process could not be started");
}

static void yield_now(struct iswi_holder *holder)
{
	if (holder->phase != ISWI_HOLD_SERVING || !holder->standby.ready) {
		tell_active(holder, "refused ", "no standby is ready");
		return;
	}
	holder->reason = "restart";
	holder->yielding = true;
	kill(holder->active.pid, SIGKILL);
}

static void keep_descriptor(struct iswi_holder *holder, const char *name, int fd)
{
	/* Without a free slot a take-over lacks it; the successor that misses it says so. */
	if (fd >= 0)
		(void)iswi_keep_put(&holder->keep, name, fd);
}

static void hear_active(struct iswi_holder *holder)
{
	char text[ISWI_HOLD_TEXT_MAX + 1];
	int fd;

	while (iswi_child_hear(&holder->active, text, &fd) > 0) {
		if (strncmp(text, "keep ", 5) == 0) {
			keep_descriptor(holder, text + 5, fd);
			continue;
		}
		if (fd >= 0)
			close(fd);
		if (said_ring(&holder->active, text))
			continue;
		if (strncmp(text, "drop ", 5) == 0) {
			iswi_keep_drop(&holder->keep, text + 5);
		} else if (strcmp(text, "serving") == 0) {
			now_serving(holder);
		} else if (strcmp(text, "ending") == 0) {
			holder->phase = ISWI_HOLD_ENDING;
			holder->signal_wanted = 0;
		} else if (strncmp(text, "ended ", 6) == 0) {
			holder->ended = true;
		} else if (strcmp(text, "renew") == 0) {
			renew(holder, "");
		} else if (strncmp(text, "renew ", 6) == 0) {
			renew(holder, text + 6);
		} else if (strcmp(text, "yield") == 0) {
			yield_now(holder);
		} else if (strncmp(text, "hopeless", 8) == 0) {
			holder->phase = ISWI_HOLD_ENDING;
		}
	}
}

/* ------------------------------------------------------------------------ events */

void iswi_roles_hear(struct iswi_holder *holder)
{
	hear_active(holder);
	hear_waiting(holder, &holder->fresh);
	hear_waiting(holder, &holder->standby);
}

void iswi_roles_died(struct iswi_holder *holder, pid_t pid, bool by_signal, int number)
{
	/* What it said before it died counts. */
	iswi_roles_hear(holder);
	if (holder->phase == ISWI_HOLD_DONE)
		return;
	if (pid == holder->active.pid)
		active_died(holder, by_signal, number);
	else if (pid == holder->standby.pid)
		standby_failed(holder, "it has died; another one is started", 0);
	else if (pid == holder->fresh.pid)
		fresh_failed(holder, "the new process died while it was prepared");
}

void iswi_roles_signal(struct iswi_holder *holder, int number)
{
	bool orphaned =
		holder->phase == ISWI_HOLD_ORPHANED || holder->phase == ISWI_HOLD_TAKING_OVER;

	/*
	 * The next process that serves gets it, too, unless this one answers: this one may be dead
	 * without our knowing, or die before it handles the signal.
	 */
	if (orphaned || holder->phase == ISWI_HOLD_SERVING)
		holder->signal_wanted = number;
	if (!orphaned && holder->active.pid > 0)
		kill(holder->active.pid, number);
}

static void end_overdue(struct iswi_holder *holder, uint64_t now)
{
	/* Their deaths are dealt with as any other. */
	if (holder->active.until_ns && now >= holder->active.until_ns) {
		holder->active.until_ns = 0;
		kill(holder->active.pid, SIGKILL);
	}
	if (holder->standby.until_ns && now >= holder->standby.until_ns)
		standby_failed(holder, "it was not ready in time; another one is started", 0);
	if (holder->fresh.until_ns && now >= holder->fresh.until_ns)
		fresh_failed(holder, "the new process was not ready in time");
}

static uint64_t earliest(uint64_t next, uint64_t at_ns)
{
	return at_ns ? ISWI_MIN(next, at_ns) : next;
}

/* By then standard output and error are the log: a standby must not keep the starter's open. */
static bool is_half_started(struct iswi_holder *holder)
{
	return holder->phase == ISWI_HOLD_STARTING && holder->active.sock >= 0 &&
	       iswi_keep_has(&holder->keep, ISWI_HOLD_STATE);
}

uint64_t iswi_roles_step(struct iswi_holder *holder)
{
	uint64_t now = iswi_now_ns(), next = UINT64_MAX;
	bool is_served = holder->phase == ISWI_HOLD_SERVING || holder->phase == ISWI_HOLD_ORPHANED;
	bool wants_standby = is_served || is_half_started(holder);

	if (holder->phase == ISWI_HOLD_DONE)
		return next;
	end_overdue(holder, now);
	/* It has closed its end since no other process could take over from it. */
	if (holder->phase == ISWI_HOLD_STARTING && holder->active.sock < 0 &&
	    iswi_child_is(&holder->standby))
		iswi_child_end(&holder->standby);
	if (is_served && iswi_child_is(&holder->standby) && !holder->standby.told)
		prepare(holder, &holder->standby);
	if (holder->phase == ISWI_HOLD_ORPHANED && holder->standby.ready &&
	    now >= holder->take_over_ns)
		take_over(holder);
	/* Not during a take-over: starting a process may wait for the device's pages. */
	else if (wants_standby && !iswi_child_is(&holder->standby) &&
		 !iswi_child_is(&holder->fresh) && now >= holder->spawn_ns)
		start_waiting(holder, &holder->standby);
	if (holder->phase == ISWI_HOLD_ORPHANED && holder->standby.ready)
		next = earliest(next, holder->take_over_ns);
	if (wants_standby && !iswi_child_is(&holder->standby) && !iswi_child_is(&holder->fresh))
		next = earliest(next, holder->spawn_ns);
	next = earliest(next, holder->active.until_ns);
	next = earliest(next, holder->standby.until_ns);
	next = earliest(next, holder->fresh.until_ns);
	return next == UINT64_MAX ? next : (next > now ? next - now : 0);
}
