/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The whole of it, with threads, a real backup file and a donor behind a link that stands still
 * again and again, for longer than a fault may take and less long than a request's deadline: reads
 * are answered from the backup meanwhile, every byte is right, and the donor is not given up. Then
 * the disk does the same, as the quicker source.
 */
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine/backup/backup.h"
#include "engine/remote/remote.h"
#include "engine_real.h"
#include "tcp_fixture.h"

#define SLAB_PAGES  256u
#define RUN_PAGES   8u
#define STALLS      5u
#define READERS     2u
#define HEDGE_US    5000u
#define DEADLINE_MS (2000u * WAIT_S)

/* ---------------------------------------------- the link, one connection to the donor */

struct link {
	struct server server;
	uint16_t donor_port;
	atomic_bool still; /* relaxed: soon is enough */
};

static void link_run(int fd, void *arg)
{
	struct link *link = arg;
	struct sockaddr_in in = {.sin_family = AF_INET, .sin_port = htons(link->donor_port)};
	int donor = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	struct pollfd fds[2] = {{.fd = fd, .events = POLLIN}, {.fd = donor, .events = POLLIN}};
	static char bytes[10000]; /* cuts through the middle of pages */

	in.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	CHECK_EQ(connect(donor, (struct sockaddr *)&in, sizeof(in)), 0);
	for (;;) {
		if (atomic_load_explicit(&link->still, memory_order_relaxed)) {
			usleep(1000);
			continue;
		}
		CHECK(poll(fds, 2, 10) >= 0);
		for (uint32_t i = 0; i < 2; i++) {
			ssize_t n = fds[i].revents ? recv(fds[i].fd, bytes, sizeof(bytes), 0) : 1;

			if (n <= 0 || (fds[i].revents && !say(fds[1 - i].fd, bytes, (size_t)n))) {
				close(donor);
				return;
			}
		}
	}
}

/* ------------------------------------------------------------------------- the disk */

static struct {
	struct iswi_backup_ops ops;
	int (*read)(void *ctx, void *buf, uint32_t bytes, uint64_t offset);
	atomic_bool still;
	atomic_uint stuck; /* reads that it has not answered */
} disk;

static int disk_read(void *ctx, void *buf, uint32_t bytes, uint64_t offset)
{
	if (!atomic_load(&disk.still))
		return disk.read(ctx, buf, bytes, offset);
	atomic_fetch_add(&disk.stuck, 1);
	while (atomic_load(&disk.still))
		usleep(1000);
	atomic_fetch_sub(&disk.stuck, 1);
	memset(buf, 0x5a, bytes);
	return -EIO;
}

/* Before anything is read. */
static void disk_take(isw_engine *e)
{
	disk.ops = *e->backup->ops;
	disk.read = disk.ops.read;
	disk.ops.read = disk_read;
	e->backup->ops = &disk.ops;
}

/* ------------------------------------------------------------------------- requests */

static uint64_t value_of(uint64_t page, uint32_t word)
{
	return (page + 1) << 20 | word;
}

static void *buffer_new(void)
{
	void *data = aligned_alloc(ISW_PAGE_BYTES, RUN_PAGES * ISW_PAGE_BYTES);

	CHECK(data);
	return data;
}

static void write_all(isw_engine *e)
{
	uint64_t *data = buffer_new();

	for (uint64_t page = 0; page < SLAB_PAGES; page += RUN_PAGES) {
		for (uint32_t i = 0; i < RUN_PAGES * ISW_PAGE_BYTES / 8; i++)
			data[i] = value_of(page, i);
		CHECK_EQ(ask_and_wait(e, ISWI_WRITE, page, RUN_PAGES, data), 0);
	}
	free(data);
	CHECK_EQ(isw_engine_settle(e, WAIT_S * 1000), 0);
}

struct reader {
	isw_engine *engine;
	pthread_t thread;
	atomic_bool *stop;
	uint64_t slowest_ns;
};

static void *reader_main(void *arg)
{
	struct reader *reader = arg;
	uint64_t *data = buffer_new();

	for (uint64_t page = 0; !atomic_load_explicit(reader->stop, memory_order_relaxed);
	     page = (page + RUN_PAGES) % SLAB_PAGES) {
		uint64_t start_ns = iswi_now_ns();

		/* A leg that comes late would write into what the next read has. */
		memset(data, 0xa5, RUN_PAGES * ISW_PAGE_BYTES);
		CHECK_EQ(ask_and_wait(reader->engine, ISWI_READ, page, RUN_PAGES, data), 0);
		reader->slowest_ns = ISWI_MAX(reader->slowest_ns, iswi_now_ns() - start_ns);
		for (uint32_t i = 0; i < RUN_PAGES * ISW_PAGE_BYTES / 8; i++)
			CHECK_EQ(data[i], value_of(page, i));
	}
	free(data);
	return NULL;
}

/* ---------------------------------------------------------------------------- world */

static isw_engine *engine_start(void)
{
	const struct isw_engine_config config = {
		.size_bytes = SLAB_PAGES * ISW_PAGE_BYTES,
		.slab_bytes = SLAB_PAGES * ISW_PAGE_BYTES,
		.staging_pages = 1024,
		.request_bytes_max = RUN_PAGES * ISW_PAGE_BYTES,
		.requests_max = READERS + 1,
		.remotes_max = 1,
		.state_fd = -1,
		.backup_write_bytes_max = 32 * ISW_PAGE_BYTES,
		.backup_writers = 1,
		.backup_readers = 2,
		.hedge_us_min = HEDGE_US,
		.flags = ISW_ENGINE_QUICKER,
	};

	return engine_with_backup(&config, "stall");
}

static isw_store *donor_start(isw_engine *e, struct link *link)
{
	char ticket[ISW_TICKET_TEXT_BYTES];
	struct isw_remote_config remote;
	struct isw_error error = {0};
	uint64_t lease, generation;
	uint32_t number, slot;
	isw_store *store =
		donor_store("127.0.0.1", SLAB_PAGES * ISW_PAGE_BYTES, 1, 1, &link->donor_port);

	CHECK_EQ(lease_create(store, 1, ticket, &lease, &error), 0);
	CHECK_EQ(isw_store_map(store, lease, 0, &slot, &generation), 0);
	server_start(&link->server, link_run, link);
	remote = donor_config("127.0.0.1", link->server.port, ticket, 1,
			      SLAB_PAGES * ISW_PAGE_BYTES);
	remote.request_ms_max = DEADLINE_MS;
	CHECK_EQ(isw_remote_connect(e, &remote, &number, &error), 0);
	CHECK_EQ(isw_slab_map(e, 0, number, slot, generation), 0);
	return store;
}

static struct isw_engine_stats stats_of(isw_engine *e)
{
	struct isw_engine_stats stats;

	isw_engine_stats(e, &stats);
	return stats;
}

/* The donor owes nothing, and is asked again. */
static void wait_answered(isw_engine *e)
{
	uint64_t before = stats_of(e).pages_in_remote;

	WAIT_FOR(!atomic_load(&e->remotes[0].owed) && stats_of(e).pages_in_remote > before);
}

/* The disk is thought quicker, and hangs until the donor has answered these reads. */
static void stall_disk(isw_engine *e)
{
	uint64_t *data = buffer_new(), hedged = stats_of(e).hedged_reads, second_legs;

	/*
	 * A second leg of the stall before may still be queued: it would be stuck now, and counts
	 * there.
	 */
	WAIT_FOR(!atomic_load(&e->backup->speed.pages));
	for (uint32_t load = 0; load < ISWI_SPEED_LOADS; load++) {
		atomic_store(&e->remotes[0].speed.took_ns[load], 60000000000ull);
		atomic_store(&e->backup->speed.took_ns[load], 1000);
	}
	atomic_store(&e->remotes[0].speed.measure_ns, 1ull << 62);
	atomic_store(&disk.still, true);
	for (uint64_t page = 0; page < SLAB_PAGES; page += RUN_PAGES) {
		CHECK_EQ(ask_and_wait(e, ISWI_READ, page, RUN_PAGES, data), 0);
		for (uint32_t i = 0; i < RUN_PAGES * ISW_PAGE_BYTES / 8; i++)
			CHECK_EQ(data[i], value_of(page, i));
	}
	/*
	 * After one they all go to the donor. On a host whose processors are full a donor may be
	 * slow as well: then the disk gets that read's second leg.
	 */
	second_legs = stats_of(e).hedged_reads - hedged;
	CHECK(second_legs >= 1 && second_legs < SLAB_PAGES / RUN_PAGES);
	/* A read counts as slow from when it is queued; the disk's thread may not have begun it. */
	WAIT_FOR(atomic_load(&disk.stuck) >= 1);
	CHECK(atomic_load(&disk.stuck) <= second_legs);
	atomic_store(&disk.still, false);
	free(data);
}

int main(void)
{
	static struct link link;
	isw_engine *e = engine_start();
	isw_store *store = donor_start(e, &link);
	struct reader readers[READERS] = {0};
	struct isw_engine_stats after;
	struct isw_remote_info remote;
	atomic_bool stop = false;
	uint64_t wins;

	disk_take(e);
	write_all(e);
	for (uint32_t i = 0; i < READERS; i++) {
		readers[i] = (struct reader){.engine = e, .stop = &stop};
		CHECK_EQ(pthread_create(&readers[i].thread, NULL, reader_main, &readers[i]), 0);
	}
	for (uint32_t i = 0; i < STALLS; i++) {
		usleep(100000);
		wait_answered(e);
		wins = stats_of(e).hedged_wins;
		atomic_store_explicit(&link.still, true, memory_order_relaxed);
		usleep(300000);
		WAIT_FOR(stats_of(e).hedged_wins > wins); /* nobody waits for the silent donor */
		atomic_store_explicit(&link.still, false, memory_order_relaxed);
	}
	wait_answered(e);
	atomic_store_explicit(&stop, true, memory_order_relaxed);
	for (uint32_t i = 0; i < READERS; i++) {
		CHECK_EQ(pthread_join(readers[i].thread, NULL), 0);
		CHECK(readers[i].slowest_ns < DEADLINE_MS * 1000000ull / 2);
	}
	for (uint32_t i = 0; i < STALLS; i++)
		stall_disk(e);
	CHECK_EQ(isw_engine_remotes(e, 1, &remote), 1);
	CHECK_EQ(remote.state, 1);
	after = stats_of(e);
	printf("%llu reads hedged, %llu by the backup; %llu pages from the donor, %llu from the "
	       "backup; the slowest took %llu and %llu us, the tail is %llu us\n",
	       (unsigned long long)after.hedged_reads, (unsigned long long)after.hedged_wins,
	       (unsigned long long)after.pages_in_remote, (unsigned long long)after.pages_in_backup,
	       (unsigned long long)readers[0].slowest_ns / 1000,
	       (unsigned long long)readers[1].slowest_ns / 1000,
	       (unsigned long long)remote.read_tail_ns / 1000);
	CHECK_EQ(after.requests_failed, 0);
	CHECK_EQ(after.crc_errors_remote + after.crc_errors_backup, 0);
	isw_engine_destroy(e);
	server_join(&link.server);
	isw_store_destroy(store);
	return 0;
}
