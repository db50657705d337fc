// SPDX-License-Identifier: Apache-2.0
/* The donor's store, one thing at a time: slabs, leases, slots, and who may connect. */
#include "store_fixture.h"

#define SLAB_BYTES 65536u
#define SLABS      3u

/* A test leaves nothing behind. */
static void end(void)
{
	CHECK_EQ(store_stats().slabs_free, SLABS);
	CHECK_EQ(store_stats().protocol_errors, 0);
	tear_down();
}

#define STORE_TEST(name) BETWEEN_TEST(name, set_up(SLAB_BYTES, SLABS), end())

TEST(test_bad_configurations)
{
	struct isw_store_config config;
	struct isw_error error;

#define REFUSED(field, value)                                                                      \
	do {                                                                                       \
		config = config_of(SLAB_BYTES, SLABS);                                             \
		config.field = (value);                                                            \
		error.text[0] = '\0';                                                              \
		CHECK_EQ(isw_store_create(&config, &store, &error), -EINVAL);                      \
		CHECK(error.text[0] != '\0');                                                      \
	} while (0)
	REFUSED(slab_bytes, 0);
	REFUSED(slab_bytes, 4097);
	REFUSED(slab_bytes, UINT64_MAX - 4095);
	REFUSED(slabs_max, 0);
	REFUSED(slabs_max, UINT32_MAX);
	REFUSED(leases_max, 0);
	REFUSED(connections_max, 0);
	REFUSED(connections_per_lease_max, 0);
	REFUSED(handshake_ms_max, 0);
	REFUSED(send_ms_max, 0);
#undef REFUSED
	isw_store_destroy(NULL);
}

TEST(test_pool)
{
	struct isw_store_config config = config_of(SLAB_BYTES, SLABS);
	struct isw_error error;

	CHECK_EQ(isw_store_create(&config, &store, NULL), 0);
	CHECK_EQ(isw_store_release_free(store), -ENOENT);
	CHECK_EQ(isw_store_scrub(store), -ENOENT);
	for (unsigned i = 0; i < SLABS; i++)
		CHECK_EQ(isw_store_preallocate(store, &error), 0);
	CHECK_EQ(isw_store_preallocate(store, &error), -ENOSPC);
	CHECK_EQ(error.code, -ENOSPC);
	CHECK_EQ(store_stats().slabs_free, SLABS);
	CHECK_EQ(isw_store_release_free(store), 0);
	CHECK_EQ(store_stats().slabs_free, SLABS - 1);
	CHECK_EQ(isw_store_preallocate(store, &error), 0);
	CHECK(store_stats().slabs_unpinned <= SLABS);
	isw_store_destroy(store);
}

/* Memory the host does not have is an error, and the place in the pool is not lost. */
TEST(test_no_memory)
{
	struct isw_store_config config = config_of((1ull << 47) - 4096, 1);
	struct isw_error error;

	CHECK_EQ(isw_store_create(&config, &store, NULL), 0);
	for (unsigned i = 0; i < 3; i++) {
		CHECK_EQ(isw_store_preallocate(store, &error), -ENOMEM);
		CHECK(strstr(error.text, "memory") != NULL);
	}
	CHECK_EQ(store_stats().slabs_free, 0);
	isw_store_destroy(store);
}

STORE_TEST(test_listen_errors)
{
	struct isw_error error;
	uint16_t other;

	CHECK_EQ(isw_store_listen(store, "127.0.0.1", port, &other, &error), -EADDRINUSE);
	CHECK(strstr(error.text, "127.0.0.1") != NULL);
	CHECK(isw_store_listen(store, "256.1.1.1", 0, &other, &error) < 0);
	CHECK(isw_store_listen(store, "", 0, &other, &error) < 0);
	/* 192.0.2.0/24 is for documentation: no host has it. */
	CHECK(isw_store_listen(store, "192.0.2.1", 0, &other, &error) < 0);
}

STORE_TEST(test_map_and_unmap)
{
	struct leased leased = lease_slots(SLABS + 1);
	struct mapped mapped[SLABS];
	uint64_t generation;
	uint32_t slot;

	for (unsigned i = 0; i < SLABS; i++) {
		mapped[i] = map_slab(leased.lease);
		for (unsigned k = 0; k < i; k++) {
			CHECK(mapped[i].slot != mapped[k].slot);
			CHECK(mapped[i].generation > mapped[k].generation);
		}
	}
	CHECK_EQ(isw_store_map(store, leased.lease, 0, &slot, &generation), -ENOENT);
	CHECK_EQ(isw_store_unmap(store, leased.lease, mapped[0].slot, mapped[0].generation + 1, 0),
		 -ESTALE);
	CHECK_EQ(isw_store_unmap(store, leased.lease, SLABS + 1, 1, 0), -EINVAL);
	CHECK_EQ(isw_store_unmap(store, leased.lease + 100, 0, 1, 0), -ENOENT);
	CHECK_EQ(unmap_slab(leased.lease, mapped[0], 0), 0);
	CHECK_EQ(unmap_slab(leased.lease, mapped[0], 0), -ESTALE);
	CHECK_EQ(store_stats().slabs_dirty, 1);
	/* Dirty is not free. */
	CHECK_EQ(isw_store_map(store, leased.lease, 0, &slot, &generation), -ENOENT);
	CHECK_EQ(isw_store_scrub(store), 0);
	CHECK_EQ(store_stats().slabs_free, 1);
	mapped[0] = map_slab(leased.lease);
	CHECK(mapped[0].generation > mapped[SLABS - 1].generation);
	CHECK_EQ(lease_stats(leased.lease).slots_mapped, SLABS);
	CHECK_EQ(isw_store_lease_destroy(store, leased.lease), 0);
	CHECK_EQ(isw_store_lease_destroy(store, leased.lease), -ENOENT);
	CHECK_EQ(store_stats().slabs_dirty, SLABS);
	scrub_all();
}

STORE_TEST(test_slots_run_out)
{
	struct leased leased = lease_slots(1);
	struct mapped mapped = map_slab(leased.lease);
	uint64_t generation;
	uint32_t slot;

	CHECK_EQ(isw_store_map(store, leased.lease, 0, &slot, &generation), -ENOSPC);
	CHECK_EQ(unmap_slab(leased.lease, mapped, 0), 0);
	give_back(leased.lease);
}

STORE_TEST(test_leases)
{
	struct leased leased[4];
	struct isw_error error;
	char ticket[ISW_TICKET_TEXT_BYTES];
	uint64_t lease;

	for (unsigned i = 0; i < 4; i++) {
		leased[i] = lease_slots(2);
		CHECK_EQ(strlen(leased[i].ticket), 32);
		CHECK_EQ(strspn(leased[i].ticket, "0123456789abcdef"), 32);
		for (unsigned k = 0; k < i; k++) {
			CHECK(leased[i].lease != leased[k].lease);
			CHECK(strcmp(leased[i].ticket, leased[k].ticket) != 0);
		}
	}
	CHECK_EQ(lease_create(store, 2, ticket, &lease, &error), -ENOSPC);
	CHECK_EQ(lease_create(store, UINT32_MAX, ticket, &lease, &error), -EINVAL);
	CHECK_EQ(store_stats().leases, 4);
	for (unsigned i = 0; i < 4; i++)
		CHECK_EQ(isw_store_lease_destroy(store, leased[i].lease), 0);
	/* Numbers are not given out twice. */
	leased[0] = lease_slots(2);
	CHECK(leased[0].lease > leased[3].lease);
	CHECK_EQ(isw_store_lease_destroy(store, leased[0].lease), 0);
}

STORE_TEST(test_what_a_request_reaches)
{
	struct leased leased = lease_slots(3);
	struct mapped first = map_slab(leased.lease), second = map_slab(leased.lease);
	uint64_t at = first.slot * (uint64_t)SLAB_BYTES, empty;
	char page[4096] = {0}, long_one[8192] = {0};
	struct described described = {0};
	int fd;

	CHECK_EQ(second.slot, first.slot + 1);
	empty = (second.slot + 1) * (uint64_t)SLAB_BYTES;
	fd = dial(port);
	greet(fd, NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES);
	CHECK_EQ(ask_export(fd, NBD_OPT_GO, leased.ticket, &described), NBD_REP_ACK);
	CHECK_EQ(described.size, 3 * SLAB_BYTES);
	check_bytes(fd, at, 0, 4096);
	fill_bytes(fd, at + SLAB_BYTES - 4096, 1, 4096);
	fill_bytes(fd, at + SLAB_BYTES, 2, 4096);
	check_bytes(fd, at + SLAB_BYTES - 4096, 1, 4096);
	/* Over a border: refused, though both sides are mapped. */
	CHECK_EQ(do_read(fd, at + SLAB_BYTES - 4096, long_one, 8192), NBD_EINVAL);
	CHECK_EQ(do_write(fd, at + SLAB_BYTES - 4096, long_one, 8192), NBD_EINVAL);
	CHECK_EQ(do_command(fd, NBD_CMD_TRIM, 0, at, SLAB_BYTES + 1), NBD_EINVAL);
	/* An empty slot: an error, never bytes. */
	CHECK_EQ(do_read(fd, empty, page, 4096), NBD_EIO);
	CHECK_EQ(do_write(fd, empty, page, 4096), NBD_EIO);
	CHECK_EQ(do_command(fd, NBD_CMD_WRITE_ZEROES, 0, empty, 4096), NBD_EIO);
	CHECK_EQ(do_read(fd, 3 * SLAB_BYTES, page, 4096), NBD_EINVAL);
	CHECK_EQ(do_command(fd, NBD_CMD_TRIM, 0, at + SLAB_BYTES, 4096), 0);
	check_bytes(fd, at + SLAB_BYTES, 0, 4096);
	CHECK_EQ(lease_stats(leased.lease).write_bytes, 2 * 4096);
	CHECK_EQ(store_stats().request_errors, 7);
	close(fd);
	give_back(leased.lease);
}

STORE_TEST(test_who_may_connect)
{
	struct leased leased = lease_slots(1), other = lease_slots(1);
	int fds[9], fd;
	char names[4][40] = {""};

	fd = dial(port);
	greet(fd, NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES);
	CHECK(say_option(fd, NBD_OPT_LIST, NULL, 0));
	CHECK_EQ(hear_option(fd, NBD_OPT_LIST, NULL, 0, NULL), NBD_REP_ACK);
	snprintf(names[1], sizeof(names[1]), "%.31s", leased.ticket);
	snprintf(names[2], sizeof(names[2]), "%s0", leased.ticket);
	snprintf(names[3], sizeof(names[3]), "%s", leased.ticket);
	names[3][31] = names[3][31] == '0' ? '1' : '0';
	for (unsigned i = 0; i < 4; i++)
		CHECK_EQ(ask_export(fd, NBD_OPT_GO, names[i], NULL), NBD_REP_ERR_UNKNOWN);
	CHECK_EQ(ask_export(fd, NBD_OPT_INFO, leased.ticket, NULL), NBD_REP_ACK);
	close(fd);
	for (unsigned i = 0; i < 8; i++)
		fds[i] = open_export(port, leased.ticket);
	fds[8] = dial(port);
	CHECK_EQ(try_open(fds[8], leased.ticket), NBD_REP_ERR_POLICY);
	CHECK_EQ(store_stats().connections_refused, 5);
	CHECK_EQ(lease_stats(leased.lease).connections, 8);
	/* Another lease is not touched by that. */
	fd = open_export(port, other.ticket);
	close(fd);
	close(fds[0]);
	WAIT_FOR(lease_stats(leased.lease).connections == 7);
	CHECK_EQ(ask_export(fds[8], NBD_OPT_GO, leased.ticket, NULL), NBD_REP_ACK);
	CHECK_EQ(isw_store_lease_destroy(store, leased.lease), 0);
	for (unsigned i = 1; i < 9; i++) {
		await_close(fds[i]);
	}
	fd = dial(port);
	CHECK_EQ(try_open(fd, leased.ticket), NBD_REP_ERR_UNKNOWN);
	close(fd);
	CHECK_EQ(isw_store_lease_destroy(store, other.lease), 0);
}

/* To try the data port: a page goes there and comes back, and no slab is taken for it. */
STORE_TEST(test_a_lease_of_no_slots_has_one_page)
{
	for (unsigned next = 0; next < 2; next++) {
		struct leased leased = lease_slots(0);
		struct described described = {0};
		char page[4096] = {0};
		uint64_t generation;
		uint32_t slot;
		int fd = dial(port);

		greet(fd, NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES);
		CHECK_EQ(ask_export(fd, NBD_OPT_GO, leased.ticket, &described), NBD_REP_ACK);
		CHECK_EQ(described.size, 4096);
		check_bytes(fd, 0, 0, 4096);
		fill_bytes(fd, 0, 0xee, 4096);
		check_bytes(fd, 0, 0xee, 4096);
		CHECK_EQ(do_read(fd, 4096, page, 1), NBD_EINVAL);
		CHECK_EQ(do_write(fd, 1, page, 4096), NBD_ENOSPC);
		CHECK_EQ(isw_store_map(store, leased.lease, 0, &slot, &generation), -ENOSPC);
		CHECK_EQ(isw_store_unmap(store, leased.lease, 0, 0, 0), -EINVAL);
		CHECK_EQ(lease_stats(leased.lease).slots_mapped, 0);
		CHECK_EQ(store_stats().slabs_free, SLABS);
		close(fd);
		CHECK_EQ(isw_store_lease_destroy(store, leased.lease), 0);
		CHECK_EQ(store_stats().slabs_free, SLABS);
	}
}

/* What one lease wrote is not there for the next that gets the slab. */
STORE_TEST(test_no_bytes_left_behind)
{
	for (unsigned next = 0; next < 2; next++) {
		struct leased leased = lease_slots(SLABS);
		struct mapped mapped[SLABS];
		int fd = open_export(port, leased.ticket);
		char byte;

		for (unsigned i = 0; i < SLABS; i++) {
			mapped[i] = map_slab(leased.lease);
			check_bytes(fd, mapped[i].slot * (uint64_t)SLAB_BYTES, 0, SLAB_BYTES);
			fill_bytes(fd, mapped[i].slot * (uint64_t)SLAB_BYTES, 0xee, SLAB_BYTES);
		}
		/* Some come back from the lease, and one with it. */
		for (unsigned i = 0; i + 1 < SLABS; i++)
			CHECK_EQ(unmap_slab(leased.lease, mapped[i], WAIT_S * 1000), 0);
		CHECK_EQ(do_read(fd, mapped[0].slot * (uint64_t)SLAB_BYTES, &byte, 1), NBD_EIO);
		close(fd);
		give_back(leased.lease);
	}
}

STORE_TEST(test_renew)
{
	struct leased leased = lease_slots(1);
	struct mapped mapped = map_slab(leased.lease);
	char ticket[ISW_TICKET_TEXT_BYTES];
	int fd = open_export(port, leased.ticket);

	fill_bytes(fd, 0, 9, 4096);
	CHECK_EQ(lease_stats(leased.lease).epoch, 1);
	CHECK_EQ(lease_renew(store, leased.lease, WAIT_S * 1000, ticket), 0);
	CHECK(strcmp(ticket, leased.ticket) != 0);
	CHECK_EQ(lease_stats(leased.lease).epoch, 2);
	CHECK_EQ(lease_stats(leased.lease).connections, 0);
	await_close(fd);
	fd = dial(port);
	CHECK_EQ(try_open(fd, leased.ticket), NBD_REP_ERR_UNKNOWN);
	/* The slab stayed, with its bytes and its generation. */
	CHECK_EQ(ask_export(fd, NBD_OPT_GO, ticket, NULL), NBD_REP_ACK);
	check_bytes(fd, 0, 9, 4096);
	CHECK_EQ(unmap_slab(leased.lease, mapped, WAIT_S * 1000), 0);
	CHECK_EQ(lease_renew(store, leased.lease + 100, 0, ticket), -ENOENT);
	close(fd);
	give_back(leased.lease);
}
